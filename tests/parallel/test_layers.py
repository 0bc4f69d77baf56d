"""Tensor-parallel layers against the dense ones, forward and gradients, in float64, on every share."""

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn

from gridtron.core import Grid, Ledger
from gridtron.core.sharding import even_ranges
from gridtron.parallel import (
    DataParallel,
    TensorParallelLinear,
    VocabParallelEmbedding,
    full_state_dict,
    load_full_state_dict,
    vocab_parallel_cross_entropy,
)
from gridtron.parallel.collectives import gather_from_sequence, scatter_to_sequence


class TwoLinears(nn.Module):
    """Column then row, as an MLP, with or without sequence parallelism."""

    def __init__(self, axis, sequence_parallel, ffn=11, bias=True):
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "bias": bias, "dtype": torch.float64}
        self.up = TensorParallelLinear(8, ffn, axis, "column", **options)
        self.down = TensorParallelLinear(ffn, 6, axis, "row", **options)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def dense(state, x):
    return F.linear(F.gelu(F.linear(x, state["up.weight"], state["up.bias"])), state["down.weight"], state["down.bias"])


def check_mlp(sequence_parallel):
    with Grid.create(tensor=-1) as grid:
        torch.manual_seed(0)
        model = TwoLinears(grid.tensor, sequence_parallel)
        with torch.no_grad():
            model.down.bias.fill_(100.0)
        torch.manual_seed(1)
        x = torch.randn(24, 3, 8, dtype=torch.float64, requires_grad=True)
        state = {name: tensor.requires_grad_() for name, tensor in full_state_dict(model).items()}
        expected = dense(state, x)
        expected.square().sum().backward()
        reference, x.grad = x.grad, None
        y = model(scatter_to_sequence(x, grid.tensor) if sequence_parallel else x)
        if sequence_parallel:
            y = gather_from_sequence(y, grid.tensor)
            # Every rank computes the whole loss: its gradient comes back tensor-size times through the gather.
            (y.square().sum() / grid.tensor.size).backward()
        else:
            y.square().sum().backward()
        assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12)
        assert torch.allclose(x.grad, reference, rtol=1e-12, atol=1e-10)
        for name, gradient in full_state_dict(model, of="gradients").items():
            assert torch.allclose(gradient, state[name].grad, rtol=1e-12, atol=1e-9), name


@pytest.mark.case(18)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_then_row(world_size, sequence_parallel):
    run_ranks(check_mlp, world_size, sequence_parallel)


def check_initial_weights():
    with Grid.create(tensor=-1) as grid:
        torch.manual_seed(3)
        layers = nn.ModuleDict(
            {
                "a": TensorParallelLinear(7, 13, grid.tensor),
                "b": TensorParallelLinear(13, 5, grid.tensor, "row"),
                "c": TensorParallelLinear(5, 9, grid.tensor, init_method=nn.init.xavier_normal_),
                "d": VocabParallelEmbedding(101, 4, grid.tensor),
            }
        )
        return full_state_dict(layers)


def test_initial_weights_do_not_depend_on_the_axis():
    (whole,) = run_ranks(check_initial_weights, 1)
    for world_size in (2, 3):
        for state in run_ranks(check_initial_weights, world_size):
            assert state.keys() == whole.keys()
            assert all(torch.equal(state[name], whole[name]) for name in whole)


def check_embedding_and_loss(vocabulary, sequence_parallel, inplace):
    with Grid.create(tensor=-1) as grid:
        torch.manual_seed(5)
        embedding = VocabParallelEmbedding(vocabulary, 6, grid.tensor, sequence_parallel, dtype=torch.float64)
        head = TensorParallelLinear(
            6, vocabulary, grid.tensor, bias=False, sequence_parallel=sequence_parallel, dtype=torch.float64
        )
        model = nn.ModuleDict({"embedding": embedding, "head": head})
        tokens = torch.randint(0, vocabulary, (24, 2))
        target = torch.randint(0, vocabulary, (24, 2))
        target[3:5] = -100
        losses = vocab_parallel_cross_entropy(head(embedding(tokens)), target, grid.tensor, inplace=inplace)
        losses.sum().backward()
        state = {name: tensor.requires_grad_() for name, tensor in full_state_dict(model).items()}
        logits = F.linear(F.embedding(tokens, state["embedding.weight"]), state["head.weight"])
        expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
        expected.sum().backward()
        assert torch.allclose(losses, expected, rtol=1e-12, atol=1e-12)
        for name, gradient in full_state_dict(model, of="gradients").items():
            assert torch.allclose(gradient, state[name].grad, rtol=1e-12, atol=1e-12), name


@pytest.mark.case(21)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding_head_and_loss(world_size, sequence_parallel):
    run_ranks(check_embedding_and_loss, world_size, 101, sequence_parallel, world_size % 2 == 0)


def check_extreme_logits():
    with Grid.create(tensor=-1) as grid:
        for offset in (0.0, 1e30, -1e30, 80.0):
            torch.manual_seed(0)
            whole = torch.randn(5, 11) * 50 + offset
            first, last = even_ranges(11, grid.tensor.size)[grid.tensor.rank]
            logits = whole[:, first:last].clone().requires_grad_()
            target = torch.tensor([0, 5, 6, 10, -100])
            losses = vocab_parallel_cross_entropy(logits, target, grid.tensor)
            losses.sum().backward()
            dense_logits = whole.clone().requires_grad_()
            expected = F.cross_entropy(dense_logits, target, reduction="none")
            expected.sum().backward()
            assert torch.allclose(losses, expected, rtol=1e-5, atol=1e-5), offset
            assert torch.allclose(logits.grad, dense_logits.grad[:, first:last], atol=1e-6), offset


@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_is_stable(world_size):
    run_ranks(check_extreme_logits, world_size)


@pytest.mark.case(3)
def test_loss_without_any_target():
    logits = torch.full((4, 7), float("inf")).requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, torch.full((4,), -100))
    losses.sum().backward()
    assert torch.equal(losses, torch.zeros(4)) and torch.equal(logits.grad, torch.zeros(4, 7))


def check_never_gathers():
    with Grid.create(tensor=-1) as grid:
        logits = torch.randn(16, 50 + (grid.tensor.rank == 0), requires_grad=True)
        with Ledger(grid) as ledger:
            vocab_parallel_cross_entropy(
                logits, torch.zeros(16, dtype=torch.int64), grid.tensor, vocabulary=101
            ).sum().backward()
        return ledger.table()


def test_loss_moves_three_numbers_a_token():
    for table in run_ranks(check_never_gathers, 2):
        assert table == {("tensor", "all_reduce"): (2, 3 * 16 * 4)}


def check_ledger():
    with Grid.create(tensor=2, data=-1) as grid:
        torch.manual_seed(0)
        model = DataParallel(TwoLinears(grid.tensor, False, ffn=12), grid.data)
        x = torch.randn(4, 2, 8, dtype=torch.float64, requires_grad=True)
        with Ledger(grid) as ledger:
            model(x).sum().backward()
            model.finish_step()
        return ledger.table()


def test_ledger_names_axes():
    for table in run_ranks(check_ledger, 4):
        assert table["tensor", "all_reduce"] == (2, 4 * 2 * (6 + 8) * 8)
        parameters = 6 * 8 + 6 + 6 * 6 + 6
        assert table["data", "all_reduce"] == (1, (parameters + 4) * 8)


def check_gather_output():
    with Grid.create(tensor=-1) as grid:
        torch.manual_seed(0)
        layer = TensorParallelLinear(5, 7, grid.tensor, gather_output=True, dtype=torch.float64)
        x = torch.randn(3, 5, dtype=torch.float64)
        y = layer(x)
        y.square().sum().backward()
        state = full_state_dict(layer)
        assert torch.allclose(y, F.linear(x, state["weight"], state["bias"]))
        return full_state_dict(layer, of="gradients")


def test_gathered_output():
    (whole,) = run_ranks(check_gather_output, 1)
    for gradients in run_ranks(check_gather_output, 3):
        assert all(torch.allclose(gradients[name], whole[name]) for name in whole)


def check_other_kinds_of_axis():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shown = [repr(TensorParallelLinear(4, 6, axis)) for axis in (mesh["tp"], dist.group.WORLD)]
    grid = Grid.from_mesh(mesh, tensor="tp")
    return [*shown, repr(TensorParallelLinear(4, 6, grid.tensor)), grid.coordinate()]


def test_any_axis_and_its_share_shown():
    for rank, (mesh, group, grid, coordinate) in enumerate(run_ranks(check_other_kinds_of_axis, 2)):
        share = f"rows {3 * rank}:{3 * rank + 3} of 6"
        assert f"{share}, tp {rank} of 2" in mesh and f"{share}, axis {rank} of 2" in group
        assert f"{share}, tensor {rank} of 2" in grid and coordinate["tensor"] == rank
    assert "whole" in repr(TensorParallelLinear(4, 6))


def check_uneven_sequence():
    with Grid.create(tensor=-1) as grid:
        layer = TensorParallelLinear(8, 4, grid.tensor, "row", sequence_parallel=True)
        with pytest.raises(ValueError, match=r"7 does not divide over tensor=2; nearest lengths: 6, 8"):
            layer(torch.zeros(7, 1, 4))


@pytest.mark.case(20)
def test_uneven_sequence_is_refused_by_name():
    run_ranks(check_uneven_sequence, 2)


def test_bad_arguments():
    with pytest.raises(ValueError, match='"column"'):
        TensorParallelLinear(4, 4, partition="columns")
    with pytest.raises(ValueError, match="gather_output"):
        TensorParallelLinear(4, 4, partition="row", gather_output=True)
    with pytest.raises(ValueError, match="outside the vocabulary of 5"):
        VocabParallelEmbedding(5, 4)(torch.tensor([5]))
    with pytest.raises(ValueError, match="target 5"):
        vocab_parallel_cross_entropy(torch.zeros(1, 5), torch.tensor([5]))
    with pytest.raises(ValueError, match="must agree"):
        vocab_parallel_cross_entropy(torch.zeros(2, 5), torch.tensor([5]))


def test_states_that_do_not_fit_change_nothing():
    layer = TensorParallelLinear(4, 3)
    before = full_state_dict(layer)
    with pytest.raises(ValueError, match=r"(?s)missing: bias.*unexpected: extra.*weight has shape \(2, 4\)"):
        load_full_state_dict(layer, {"weight": torch.zeros(2, 4), "extra": torch.zeros(1)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_state_dict(layer).items())


def check_ledger_of_others():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    grid = Grid.from_mesh(mesh, data="dp", tensor="tp")
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    with Ledger(grid) as ledger:
        model(torch.randn(4, 8)).sum().backward()
    return ledger.table()


def test_ledger_sees_fsdp2_and_dtensor():
    for table in run_ranks(check_ledger_of_others, 4):
        # FSDP2 gathers both weights forward (kept for backward at the root) and scatters their gradients.
        own = 2 * 8 * 12 // 2 * 4
        assert table["data", "all_gather"][1] >= own and table["data", "reduce_scatter"][1] >= own
        assert table["tensor", "all_reduce"][1] >= 4 * 8 * 4


def check_fewer_features_than_ranks():
    with Grid.create(tensor=-1) as grid:
        for sequence_parallel in (False, True):
            torch.manual_seed(0)
            model = TwoLinears(grid.tensor, sequence_parallel, ffn=1)
            x = torch.randn(6, 2, 8, dtype=torch.float64, requires_grad=True)
            state = {name: tensor.requires_grad_() for name, tensor in full_state_dict(model).items()}
            expected = dense(state, x)
            expected.square().sum().backward()
            y = model(scatter_to_sequence(x, grid.tensor) if sequence_parallel else x)
            y = gather_from_sequence(y, grid.tensor) if sequence_parallel else y
            (y.square().sum() / (grid.tensor.size if sequence_parallel else 1)).backward()
            assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12)
            for name, gradient in full_state_dict(model, of="gradients").items():
                assert torch.allclose(gradient, state[name].grad, rtol=1e-11, atol=1e-11), name
        logits = torch.randn(5, 2, dtype=torch.float64)
        local = logits[:, grid.rank : grid.rank + 1 if grid.rank < 2 else grid.rank].clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(local, torch.tensor([0, 1, 0, 1, -100]), grid.tensor, vocabulary=2)
        losses.sum().backward()
        whole = F.cross_entropy(logits, torch.tensor([0, 1, 0, 1, -100]), reduction="none")
        assert torch.allclose(losses, whole, rtol=1e-12)


@pytest.mark.parametrize("world_size", [2, 3])
def test_fewer_features_than_ranks(world_size):
    run_ranks(check_fewer_features_than_ranks, world_size)
