"""Muon: the orthogonal part of whole matrices, whatever cuts them."""

import math
import random
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gridtron.core import Grid, Ledger
from gridtron.core.grid import Axis
from gridtron.core.optim.config import OptimizerConfig
from gridtron.core.optim.muon import orthogonalize, update_scale
from gridtron.core.optim.optimizer import Optimizer
from gridtron.core.pieces import Piece
from gridtron.core.sharding import Sharding

MUON = OptimizerConfig("muon", lr=0.02, momentum=0.9, weight_decay=0.1, eps=1e-6)


# -------------------------------------------------------------------- the iteration
@pytest.mark.parametrize("shape", [(6, 6), (4, 11), (11, 4), (1, 5), (5, 1)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    values = values.clamp(min=0.05 * float(values.max()))
    found = left.mT @ orthogonalize(left @ values.diag() @ right) @ right.mT
    assert (found - found.diag().diag()).abs().max() < 1e-12
    assert found.diag().min() > 0.6 and found.diag().max() < 1.3


def test_scale_and_transposition_do_not_matter_and_zero_stays_zero() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(5, 8, dtype=torch.float64)
    expected = orthogonalize(matrix)
    torch.testing.assert_close(orthogonalize(matrix * 1e-30), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(orthogonalize(matrix.mT).mT, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_an_update_is_as_large_as_adamws() -> None:
    """Root mean square of about 0.2: Liu et al. 2025, section 2.2."""
    torch.manual_seed(0)
    for shape in ((64, 256), (256, 64), (128, 128)):
        update = orthogonalize(torch.randn(shape, dtype=torch.float64), 12) * update_scale(shape)
        assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)


# -------------------------------------------------------------------- one process
def test_beside_torchs() -> None:
    """torch's computes its steps in bfloat16: the same to its few digits."""
    torch.manual_seed(0)
    start, gradients = torch.randn(24, 40), torch.randn(4, 24, 40)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = Optimizer({"w": ours}, MUON, pieces={"w": Piece(Sharding.whole((24, 40)), matrix=True)})
    peer = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        optimizer.step(0.02, {"w": gradient.clone()})
        theirs.grad = gradient.clone()
        peer.step()
    ours, theirs = ours.detach(), theirs.detach()
    assert float((ours - theirs).norm() / (theirs - start).norm()) < 0.02
    torch.testing.assert_close(
        optimizer.states()["w"]["momentum_buffer"], peer.state[peer.param_groups[0]["params"][0]]["momentum_buffer"]
    )


def whole_of(*shape: int, matrix: bool = False) -> Piece:
    return Piece(Sharding.whole(shape), matrix=matrix)


def test_what_is_no_hidden_matrix_is_adamws() -> None:
    torch.manual_seed(0)
    pieces = {"embedding": whole_of(9, 4), "w": whole_of(4, 4, matrix=True), "bias": whole_of(4, matrix=True)}
    values = {name: torch.randn(piece.shape, dtype=torch.float64) for name, piece in pieces.items()}
    found = []
    for config in (MUON, OptimizerConfig("adamw", weight_decay=0.1, eps=1e-6)):
        parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        optimizer = Optimizer(parameters, config, pieces=pieces)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            gradients = {n: torch.randn(v.shape, generator=generator).double() for n, v in values.items()}
            optimizer.step(0.02, gradients)
        found.append((parameters, optimizer.states()))
    (muon, states), (adamw, _) = found
    assert torch.equal(muon["embedding"], adamw["embedding"]) and torch.equal(muon["bias"], adamw["bias"])
    assert not torch.allclose(muon["w"], adamw["w"])
    assert {name: set(state) for name, state in states.items()} == {
        "embedding": {"step", "exp_avg", "exp_avg_sq"},
        "bias": {"step", "exp_avg", "exp_avg_sq"},
        "w": {"momentum_buffer"},
    }


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("only", ["w", "bias"])
def test_a_rank_may_hold_matrices_alone_or_none(only: str, momentum: float) -> None:
    pieces = {"w": whole_of(3, 5, matrix=True), "bias": whole_of(4)}
    parameter = nn.Parameter(torch.ones(pieces[only].shape))
    config = OptimizerConfig("muon", momentum=momentum)
    optimizer = Optimizer({only: parameter}, config, pieces={only: pieces[only]})
    optimizer.step(0.1, {})
    assert torch.equal(parameter, torch.ones_like(parameter))
    optimizer.step(0.1, {only: torch.ones_like(parameter)})
    assert (parameter < 1).all()
    Optimizer({}, config, pieces={}).step(0.1, {})


def test_a_restored_optimizer_goes_on() -> None:
    def run(steps: range, optimizer: Optimizer) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            gradients = {n: torch.randn(p.shape, generator=generator).double() for n, p in optimizer.parameters.items()}
            optimizer.step(0.02, gradients)

    def fresh() -> Optimizer:
        parameters = {"w": nn.Parameter(torch.ones(4, 6).double()), "b": nn.Parameter(torch.ones(3).double())}
        return Optimizer(parameters, MUON, pieces={"w": whole_of(4, 6, matrix=True), "b": whole_of(3)})

    whole, first, again = fresh(), fresh(), fresh()
    run(range(6), whole)
    run(range(3), first)
    saved = {name: {k: t.clone() for k, t in state.items()} for name, state in first.states().items()}
    for name, state in again.states().items():
        again.parameters[name].data.copy_(first.parameters[name])
        for key, tensor in state.items():
            tensor.copy_(saved[name][key])
    again.take_states()
    run(range(3, 6), again)
    assert all(torch.equal(whole.parameters[name], again.parameters[name]) for name in whole.parameters)


class NoFloat32(TorchDispatchMode):
    """Fails on any operation that makes or takes a tensor of another format than float64."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(value, Tensor) and value.is_floating_point():
                assert value.dtype == torch.float64, f"{function} sees {value.dtype}"
        return out


def test_in_float64_nothing_is_below() -> None:
    with NoFloat32():
        steps_of_muon(None, False, random.Random(0))


def test_weights_of_a_narrow_model_may_be_orthogonalised_in_its_format() -> None:
    """On CUDA bfloat16 is chosen; here it is asked for. The momentum and the main weight stay wide."""
    torch.manual_seed(0)
    start, gradient = torch.randn(16, 24), torch.randn(16, 24)
    found = []
    for dtype in (None, torch.bfloat16):
        parameter = nn.Parameter(start.bfloat16())
        optimizer = Optimizer({"w": parameter}, MUON, pieces={"w": whole_of(16, 24, matrix=True)})
        assert optimizer.inner is not None and optimizer.inner.param_groups[0]["dtype"] is None
        optimizer.inner.param_groups[0]["dtype"] = dtype
        optimizer.step(0.1, {"w": gradient.clone()})
        state = optimizer.states()["w"]
        assert all(tensor.dtype == torch.float32 for tensor in state.values())
        found.append(state["main"] - start.bfloat16().float())
    assert 0 < float((found[0] - found[1]).norm() / found[0].norm()) < 0.05


# -------------------------------------------------------------------- several ranks
def shardings(ranks: int) -> dict[str, Sharding]:
    """Odd sizes, rows held twice, a rank without rows; several matrices a round, and a last round that is not full."""
    shared = (
        ((((0, 4),), ((2, 7),)) if ranks == 2 else (((0, 7),),)) if ranks < 3 else (((0, 4),), ((0, 4),), ((4, 7),))
    )
    found = {
        "column": Sharding.split((7, 5), 0, ranks),
        "heads": Sharding((7, 6), 0, shared),
        "row": Sharding.split((5, 9), 1, ranks),
        "few": Sharding.split((1, 8), 0, ranks),
        "absent": Sharding.split((4, 4), 0, ranks),
        "replicated": Sharding.whole((3, 4)),
        "embedding": Sharding.split((9, 4), 0, ranks),
        "norm": Sharding.whole((5,)),
    }
    return found | {f"column{i}": Sharding.split((6, 3 + i), 0, ranks) for i in range(3)}


def steps_of_muon(grid: Grid | None, cut: bool, generator: random.Random) -> tuple[Any, Optimizer]:
    """Three steps from the same whole values; the whole results, gathered."""
    tensor, data = (grid.tensor, grid.data) if grid else (Axis("tensor"), Axis("data"))
    pieces = {}
    for name, sharding in shardings(tensor.size).items():
        edges = sorted(generator.choices(range(math.prod(sharding.local_shape(tensor.rank)) + 1), k=data.size - 1))
        ends = [0, *edges, math.prod(sharding.local_shape(tensor.rank))]
        cuts = tuple((ends[i], ends[i + 1]) for i in range(data.size)) if cut else None
        matrix = name not in ("embedding", "norm")
        pieces[name] = Piece(sharding, tensor, cuts, data if cut else Axis("data"), matrix)

    def values(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        wholes = {name: torch.randn(sharding.shape, dtype=torch.float64) for name, sharding in shardings(1).items()}
        return {name: pieces[name].take_of_whole(whole).clone() for name, whole in wholes.items()}

    parameters = {name: nn.Parameter(value) for name, value in values(0).items()}
    optimizer = Optimizer(parameters, MUON, pieces=pieces)
    for step in range(3):
        gradients = values(step + 1)
        del gradients["absent"]
        optimizer.step(0.02, gradients)
    return {name: pieces[name].gather_whole(p.detach()) for name, p in parameters.items()}, optimizer


def check_muon(sizes: dict[str, int], cut: bool) -> dict[str, Tensor]:
    with Grid.create(**sizes) as grid:
        # Cuts differ between tensor ranks, which hold different rows, and agree over data ranks.
        whole, _ = steps_of_muon(grid, cut, random.Random(grid.tensor.rank))
        return whole


GRIDS = [{"tensor": t, "data": d} for t in (1, 2, 3) for d in (1, 2, 3) if 1 < t * d <= 6 and (t, d) != (3, 2)]


@pytest.mark.sample(6)
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
@pytest.mark.parametrize("cut", [True, False])
def test_cut_matrices_are_updated_as_if_whole(sizes: dict[str, int], cut: bool) -> None:
    expected, _ = steps_of_muon(None, False, random.Random(0))
    for found in run_ranks(check_muon, math.prod(sizes.values()), sizes, cut):
        for name, tensor in expected.items():
            assert float((found[name] - tensor).abs().max() / tensor.abs().max()) < 1e-12, name


class Counted:
    """Counts matrices that this rank orthogonalises."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, matrix: Tensor, steps: int) -> Tensor:
        self.shapes.append(tuple(matrix.shape))
        return orthogonalize(matrix, steps)


def check_work() -> tuple[int, int]:
    import gridtron.core.optim.muon as module

    with Grid.create(tensor=2, data=2) as grid:
        counted, before = Counted(), module.orthogonalize
        module.orthogonalize = counted  # type: ignore[assignment]
        try:
            sharding = Sharding.split((6, 4), 0, 2)
            pieces = {f"w{i}": Piece(sharding, grid.tensor, ((0, 7), (7, 12)), grid.data, True) for i in range(6)}
            parts = {name: nn.Parameter(torch.randn(piece.shape).double()) for name, piece in pieces.items()}
            optimizer = Optimizer(parts, MUON, pieces=pieces)
            with Ledger(grid) as ledger:
                optimizer.step(0.1, {name: torch.randn_like(part) for name, part in parts.items()})
        finally:
            module.orthogonalize = before
        assert set(counted.shapes) <= {(6, 4)}
        return len(counted.shapes), ledger.calls(operation="all_to_all")


def test_ranks_share_the_work() -> None:
    """Six matrices over four ranks: each is orthogonalised once, in two rounds of at most four exchanges."""
    results = run_ranks(check_work, 4)
    assert sorted(count for count, _ in results) == [1, 1, 2, 2]
    assert all(calls <= 8 for _, calls in results)
