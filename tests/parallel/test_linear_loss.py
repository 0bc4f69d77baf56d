"""The head's product and the loss by chunks, against the loss of the product."""

import pytest
import torch
from ranks import run_ranks

from gridtron.core import Grid, Ledger
from gridtron.core.sharding import even_ranges
from gridtron.parallel.linear_loss import vocab_parallel_linear_cross_entropy
from gridtron.parallel.loss import vocab_parallel_cross_entropy

VOCABULARY, LENGTH, BATCH, FEATURES = 101, 12, 3, 8


def targets(kind):
    target = torch.randint(0, VOCABULARY, (LENGTH, BATCH))
    if kind == "half":
        target[::2] = -100
    if kind == "none":
        target[:] = -100
    return target


def check_equal(kind, sequence_parallel, chunk):
    with Grid.create(tensor=-1) as grid:
        torch.manual_seed(3)
        whole = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
        head = torch.randn(VOCABULARY, FEATURES, dtype=torch.float64)
        target, scale = targets(kind), torch.rand(LENGTH, BATCH, dtype=torch.float64)
        expected_x, expected_weight = whole.clone().requires_grad_(), head.clone().requires_grad_()
        expected = vocab_parallel_cross_entropy(expected_x @ expected_weight.t(), target)
        (expected * scale).sum().backward()
        first, last = even_ranges(VOCABULARY, grid.tensor.size)[grid.tensor.rank]
        weight = head[first:last].clone().requires_grad_()
        rows = slice(None)
        if sequence_parallel:
            share = LENGTH // grid.tensor.size
            rows = slice(grid.tensor.rank * share, (grid.tensor.rank + 1) * share)
        x = whole[rows].clone().requires_grad_()
        losses = vocab_parallel_linear_cross_entropy(
            x, weight, target, grid.tensor, sequence_parallel=sequence_parallel, chunk=chunk
        )
        (losses * scale).sum().backward()
        assert losses.shape == target.shape
        for found, true in (
            (losses, expected),
            (x.grad, expected_x.grad[rows]),
            (weight.grad, expected_weight.grad[first:last]),
        ):
            assert torch.allclose(found, true, rtol=1e-12, atol=1e-12)


@pytest.mark.case(3)
@pytest.mark.case(21)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("kind", "chunk"), [("half", 5), ("none", 36), ("all", None)])
def test_it_equals_the_loss_of_the_product(world_size, kind, chunk):
    run_ranks(check_equal, world_size, kind, world_size > 1 and kind != "all", chunk)


def check_traffic():
    with Grid.create(tensor=-1) as grid:
        x = torch.randn(16, 4, requires_grad=True)
        weight = torch.randn(50 + (grid.tensor.rank == 0), 4, requires_grad=True)
        with Ledger(grid) as ledger:
            vocab_parallel_linear_cross_entropy(
                x, weight, torch.zeros(16, dtype=torch.int64), grid.tensor, vocabulary=VOCABULARY, chunk=3
            ).sum().backward()
        return ledger.table()


def test_one_reduction_for_all_chunks():
    for table in run_ranks(check_traffic, 2):
        assert table == {("tensor", "all_reduce"): (3, (3 * 16 + 16 * 4) * 4)}


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_chunks_change_nothing(chunk):
    torch.manual_seed(0)
    x, weight = torch.randn(20, 6, dtype=torch.float64), torch.randn(11, 6, dtype=torch.float64)
    target = torch.randint(0, 11, (20,))
    losses = vocab_parallel_linear_cross_entropy(x, weight, target, chunk=chunk)
    assert torch.allclose(losses, torch.nn.functional.cross_entropy(x @ weight.t(), target, reduction="none"))


def test_only_what_is_asked_for():
    weight = torch.randn(11, 6, requires_grad=True)
    vocab_parallel_linear_cross_entropy(torch.randn(5, 6), weight, torch.zeros(5, dtype=torch.int64)).sum().backward()
    assert weight.grad is not None
    empty = torch.randn(0, 6, requires_grad=True)
    vocab_parallel_linear_cross_entropy(empty, weight, torch.zeros(0, dtype=torch.int64)).sum().backward()
    assert empty.grad.shape == (0, 6)


def test_bad_arguments():
    x, weight, target = torch.zeros(4, 6), torch.zeros(11, 6), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"target \(3,\) must be \(4,\)"):
        vocab_parallel_linear_cross_entropy(x, weight, target[:3])
    with pytest.raises(ValueError, match="last dimension"):
        vocab_parallel_linear_cross_entropy(x, weight[:, :5], target)
    with pytest.raises(ValueError, match="chunk=0"):
        vocab_parallel_linear_cross_entropy(x, weight, target, chunk=0)
    with pytest.raises(ValueError, match="target 11 is outside"):
        vocab_parallel_linear_cross_entropy(x, weight, target + 11)
    with pytest.raises(ValueError, match="has auto, triton, torch"):
        vocab_parallel_linear_cross_entropy(x, weight, target, backend="apex")
