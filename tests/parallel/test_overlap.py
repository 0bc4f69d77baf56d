"""Collectives behind the pieces of a product: equal results, gradients and bytes, whatever the cut."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from parity import FAMILIES, Case, build_engine, hold, microbatches_of, run_case
from ranks import run_ranks
from torch import nn

from gridtron.conf.compose import Refusal, compose
from gridtron.conf.rules import Surroundings
from gridtron.conf.schema import plan_to_dict
from gridtron.core import Grid, Ledger
from gridtron.core.sharding import even_ranges
from gridtron.parallel import TensorParallelLinear, activation_checkpoint, full_state_dict, overlap
from gridtron.parallel.linear import column_linear
from gridtron.parallel.recompute import RecomputeConfig
from gridtron.tools.run_directory import changed_mathematics


def small_pieces():
    """Pieces of one row or more: tests are small."""
    return mock.patch.object(overlap, "_FEWEST_ROWS", 1)


# ---------------------------------------------------------------- the cut
@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 127, 128, 129, 1023, 4096])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_pieces_cover_a_share_and_stay_large(length, batch):
    pieces = overlap.pieces_of((length, batch, 8))
    assert pieces[0][0] == 0 and pieces[-1][1] == length
    assert all(stop == start for (_, stop), (start, _) in pairwise(pieces))
    assert 1 <= len(pieces) <= 4 and all(stop > start for start, stop in pieces)
    if len(pieces) > 1:
        # A piece is a whole number of places in the sequence: it may miss the bound by one of them.
        assert all((stop - start + 1) * batch > overlap._FEWEST_ROWS for start, stop in pieces)
    if length * batch >= 4 * 128 and length >= 4:
        assert len(pieces) == 4


# ---------------------------------------------------------------- layers
class Layers(nn.Module):
    """Three products of one gather, as q, k, v, then a row-parallel one."""

    def __init__(self, axis, overlap, heads, bias=True):
        super().__init__()
        # Unequal shares: with more ranks than features a rank has none at all.
        rows = [((start * 2, stop * 2),) if stop > start else () for start, stop in even_ranges(heads, axis.size)]
        options = {"sequence_parallel": True, "bias": bias, "dtype": torch.float64, "overlap": overlap}
        self.columns = nn.ModuleList(
            TensorParallelLinear(6, heads * 2, axis, "column", rows=rows, **options) for _ in range(3)
        )
        self.row = TensorParallelLinear(heads * 2, 5, axis, "row", rows=rows, **options)

    def forward(self, x):
        layers = [(layer.weight, layer.bias) for layer in self.columns]
        first = self.columns[0]
        q, k, v = column_linear(x, layers, first.axis, first.sequence_parallel, first.overlap)
        return self.row(q * k + v)


def outcome(grid, overlap, length, heads, bias, checkpoint=False, frozen=()):
    torch.manual_seed(0)
    model = Layers(grid.tensor, overlap, heads, bias)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    torch.manual_seed(10 + grid.tensor.rank)
    x = torch.randn(length, 2, 6, dtype=torch.float64, requires_grad=not frozen)
    weights = torch.randn(length, 2, 5, dtype=torch.float64)
    with Ledger(grid) as ledger:
        y = activation_checkpoint(model, x, policy="full" if checkpoint else "none")
        (y * weights).sum().backward()
    gradients = [parameter.grad for parameter in (x, *model.parameters())]
    return [y, *(gradient for gradient in gradients if gradient is not None)], ledger


def check_layers(checkpoint):
    results = []
    with Grid.create(tensor=-1) as grid, small_pieces():
        for length, heads, bias, frozen in [
            (1, 3, True, ()),
            (3, 4, True, ()),
            (7, 1, False, ()),
            (16, 5, True, ("columns",)),
            (9, 4, True, ("row",)),
        ]:
            plain, before = outcome(grid, "none", length, heads, bias, checkpoint, frozen)
            chunked, after = outcome(grid, "chunked", length, heads, bias, checkpoint, frozen)
            assert len(plain) == len(chunked)
            for a, b in zip(plain, chunked, strict=True):
                assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), (length, heads)
            if grid.tensor.size == 1:
                assert after.table() == {}
                continue
            assert after.bytes("tensor") == before.bytes("tensor")
            for operation in ("all_gather", "reduce_scatter"):
                assert after.bytes("tensor", operation) == before.bytes("tensor", operation)
            results.append((length, after.calls("tensor", "all_gather"), after.calls("tensor", "reduce_scatter")))
    return results


@pytest.mark.sample(3)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_layers_have_equal_results_and_bytes(world_size, checkpoint):
    for results in run_ranks(check_layers, world_size, checkpoint):
        for length, gathers, scatters in results:
            pieces = min(4, length)
            if length in (9, 16):  # the input or the weights want no gradient
                continue
            # Forward and the row layer's backward in pieces; the weights' gather is one, behind the input's gradient.
            assert gathers == (2 + checkpoint) * pieces + 1
            assert scatters == (2 + checkpoint) * pieces


def check_list_of_operations():
    """A product in pieces is written into a whole: a checkpoint of a list runs it again."""
    with Grid.create(tensor=-1) as grid, small_pieces():
        layer = TensorParallelLinear(
            6, 5, grid.tensor, sequence_parallel=True, overlap="chunked", dtype=torch.float64, bias=False
        )
        found = []
        for policy in ("none", ["attention"]):
            x = torch.arange(48.0, dtype=torch.float64).view(8, 1, 6).requires_grad_()
            activation_checkpoint(lambda x: layer(x).square().cos(), x, policy=policy).sum().backward()
            found.append((x.grad, layer.weight.grad))
            layer.weight.grad = None
        assert all(map(torch.equal, *found))


def test_a_list_of_operations_around_a_layer():
    run_ranks(check_list_of_operations, 2)


def check_large_is_cut_and_small_is_not():
    with Grid.create(tensor=-1) as grid:
        return [
            (outcome(grid, "chunked", length, 2, True)[1].calls("tensor", "reduce_scatter"))
            for length in (64, 128, 512)
        ]


def test_shares_too_small_to_cut_travel_whole():
    for calls in run_ranks(check_large_is_cut_and_small_is_not, 2):
        assert calls == [2, 4, 8]


def check_an_error_in_between():
    """A product that fails while a piece travels: the error comes through, and the group still works."""
    with Grid.create(tensor=-1) as grid, small_pieces():
        for name in ("column", "row"):
            layer = TensorParallelLinear(6, 4, grid.tensor, name, sequence_parallel=True, overlap="chunked")
            x = torch.ones(8 if name == "column" else 16, 2, 6 if name == "column" else 3)
            real, calls = overlap._multiply_into, []

            def failing(*arguments, real=real, calls=calls, **options):
                calls.append(1)
                if len(calls) == 4:
                    raise MemoryError("no more")
                real(*arguments, **options)

            with mock.patch.object(overlap, "_multiply_into", failing), pytest.raises(MemoryError, match="no more"):
                layer(x)
            total = torch.ones(3)
            torch.distributed.all_reduce(total, group=grid.tensor.group)
            assert total.tolist() == [2.0] * 3 and layer(x).shape == (
                16 if name == "column" else 8,
                2,
                layer(x).shape[-1],
            )


def test_an_error_leaves_nothing_behind():
    run_ranks(check_an_error_in_between, 2)


# ---------------------------------------------------------------- the model
def run_overlapped(case):
    with small_pieces():
        return run_case(case)


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"grid": {"tensor": 2}},
        {"grid": {"tensor": 3}, "recompute": "full"},
        {"grid": {"tensor": 2, "data": 2}, "recompute": "selective", "zero": 2, "micro_batch_size": 2},
        {"grid": {"tensor": 2, "pipeline": 2}, "schedule": "zb_h1", "micro_batch_size": 2},
        {"grid": {"tensor": 2, "pipeline": 2}, "schedule": "zb_h1", "micro_batch_size": 2, "recompute": "full"},
        {"grid": {"tensor": 2, "data": 2}, "zero": 3},
    ],
    ids=str,
)
def test_a_run_does_not_depend_on_it(family, options):
    config = replace(FAMILIES[family], dropout=0.1)
    hold(config, sequence_parallel=True, overlap="chunked", run=run_overlapped, **options)


def check_ledger_of_a_step(recompute):
    tables = []
    for chosen in ("none", "chunked"):
        case = Case(grid={"tensor": 2}, sequence_parallel=True, overlap=chosen)
        with Grid.create(**case.grid) as grid, small_pieces():
            engine = build_engine(case, grid, recompute=recompute)
            with Ledger(grid) as ledger:
                engine.forward_backward(microbatches_of(case, grid, 0))
            tables.append((ledger.table(), full_state_dict(engine.model, grid, of="gradients")))
    return tables


@pytest.mark.parametrize("operations", [None, ["attention"], ["product"]])
def test_bytes_of_a_step(operations):
    recompute = RecomputeConfig("selective", operations=operations)
    for (plain, gradients), (chunked, others) in run_ranks(check_ledger_of_a_step, 2, recompute):
        assert plain.keys() == chunked.keys()
        for key, (calls, size) in plain.items():
            assert chunked[key][1] == size, key
            # A list of operations keeps whole products: overlap steps aside.
            assert (chunked[key][0] > calls) == (operations is None and key[1] in ("all_gather", "reduce_scatter")), key
        assert all(torch.allclose(gradients[name], others[name], rtol=1e-12, atol=1e-12) for name in gradients)


# ---------------------------------------------------------------- symmetric memory
def test_signatures_of_the_fused_operators():
    """What gridtron.core.torch_compat calls is what this torch has."""
    import torch.distributed._symmetric_memory

    gather = torch.ops.symm_mem.fused_all_gather_matmul.default._schema
    assert [(item.name, str(item.type), item.kwarg_only) for item in gather.arguments] == [
        ("A", "Tensor", False),
        ("Bs", "List[Tensor]", False),
        ("gather_dim", "int", False),
        ("group_name", "str", False),
        ("return_A", "bool", True),
    ]
    assert [str(item.type) for item in gather.returns] == ["Optional[Tensor]", "List[Tensor]"]
    scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter.default._schema
    assert [(item.name, str(item.type)) for item in scatter.arguments] == [
        ("A", "Tensor"),
        ("B", "Tensor"),
        ("reduce_op", "str"),
        ("scatter_dim", "int"),
        ("group_name", "str"),
    ]
    assert [str(item.type) for item in scatter.returns] == ["Tensor"]


def check_symmetric_memory(device):
    """On a CPU torch's own plain forms of the operators stand in, by the functions that it registers for tracing."""
    import torch.distributed._symmetric_memory as symmetric

    with Grid.create(tensor=-1, device=device) as grid, small_pieces():
        stand_in = mock.patch.multiple(
            overlap,
            symmetric_memory_fault=lambda: None,
            fused_gather_products=lambda share, matrices, group, keep: symmetric._fused_all_gather_matmul_fallback(
                share, matrices, 0, group.group_name, return_A=keep
            ),
            fused_product_scatter=lambda x, matrix, group: symmetric._fused_matmul_reduce_scatter_fallback(
                x, matrix, "sum", 0, group.group_name
            ),
        )
        with torch.device(grid.device):
            plain, before = outcome(grid, "none", 6, 4, True)
            with stand_in if device == "cpu" else nullcontext():
                fused, after = outcome(grid, "symmetric_memory", 6, 4, True)
        for a, b in zip(plain, fused, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        assert before.bytes("tensor") == after.bytes("tensor")


def test_symmetric_memory_has_equal_results_and_bytes():
    run_ranks(check_symmetric_memory, 2, "cpu")


@pytest.mark.gpu
def test_symmetric_memory_on_two_devices():
    """This file as a program, each rank on a device of its own over NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device reaches no other's memory")
    here = Path(__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(here)]
    environment = os.environ | {"PYTHONPATH": str(here.parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def check_ledger_of_fused():
    """On the meta device the operators run in their plain form below the ledger."""
    import torch.distributed._symmetric_memory

    with Grid.create(tensor=-1) as grid, Ledger(grid) as ledger:
        name = grid.tensor.group.group_name
        share, matrix = torch.empty(3, 2, 5, device="meta"), torch.empty(5, 7, device="meta")
        torch.ops.symm_mem.fused_all_gather_matmul(share, [matrix], 0, name, return_A=False)
        torch.ops.symm_mem.fused_matmul_reduce_scatter(share.repeat(2, 1, 1), matrix, "sum", 0, name)
    return ledger.table()


def test_the_ledger_counts_fused_operators():
    for table in run_ranks(check_ledger_of_fused, 2):
        assert table == {
            ("tensor", "all_gather"): (1, 2 * 3 * 2 * 5 * 4),
            ("tensor", "reduce_scatter"): (1, 2 * 3 * 2 * 7 * 4),
        }


# ---------------------------------------------------------------- what is refused
@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_layers_refuse_what_this_machine_has_not():
    with pytest.raises(ValueError, match=r"symmetric_memory.*CUDA.*nearest: overlap='chunked'"):
        TensorParallelLinear(4, 4, overlap="symmetric_memory")


def test_layers_refuse_what_does_not_go():
    with pytest.raises(ValueError, match="overlap='chunkd': it is one of none, chunked, symmetric_memory"):
        TensorParallelLinear(4, 4, overlap="chunkd")
    with pytest.raises(ValueError, match="goes with forward_sum='in_place' alone, and this is 'new'"):
        TensorParallelLinear(4, 4, partition="row", forward_sum="new", overlap="chunked")


@pytest.mark.parametrize(
    ("words", "devices", "message"),
    [
        (["grid.overlap=chunked"], 0, "has no effect with grid.sequence_parallel=false"),
        (["grid=tensor", "grid.overlap=symmetric_memory"], 0, "it needs CUDA devices.*nearest: grid.overlap=chunked"),
        (["grid=tensor", "grid.overlap=chunks"], 0, "nearest: chunked"),
    ],
)
def test_refused_before_anything_starts(words, devices, message):
    around = Surroundings(cores=64, devices=devices, data_fault=lambda c: None, folder_fault=lambda folder: None)
    with pytest.raises(Refusal, match=message):
        compose(["model=tiny", *words], surroundings=around)


@pytest.mark.parametrize("word", ["grid.overlap=chunked", "train.compile=true"])
def test_free_on_resume(word):
    around = Surroundings(cores=64, data_fault=lambda c: None, folder_fault=lambda folder: None)
    before, after = (
        plan_to_dict(compose(["model=tiny", "grid=tensor", *more], surroundings=around)) for more in ((), (word,))
    )
    assert before != after and changed_mathematics(before, after) == []


def test_accepted():
    around = Surroundings(cores=64, devices=4, data_fault=lambda c: None, folder_fault=lambda folder: None)
    for words in (["grid=tensor_chunked"], ["grid=tensor", "grid.overlap=symmetric_memory"]):
        plan = compose(["model=tiny", *words], surroundings=around)
        assert plan.grid.overlap != "none" and plan.grid.sequence_parallel


if __name__ == "__main__":
    check_symmetric_memory("cuda")
