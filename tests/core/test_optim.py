"""Optimizers over named parameters: decay, main weights that follow loaded ones, what may be cut."""

from typing import Any

import pytest
import torch
from parity import FAMILIES, Case, global_batch
from ranks import run_ranks
from torch import nn

from gridtron.core import Grid
from gridtron.core.errors import JobError
from gridtron.core.grid import Axis
from gridtron.core.optim.config import OptimizerConfig
from gridtron.core.optim.optimizer import Optimizer
from gridtron.core.pieces import Piece
from gridtron.core.sharding import Sharding
from gridtron.models import GPT
from gridtron.parallel import full_state_dict, load_full_state_dict
from gridtron.parallel.engine import TrainingEngine

SHARDS = Axis("data", 2, 0, (0, 1))


def cut(shape: tuple[int, ...], start: int, stop: int) -> Piece:
    """The first of two flat ranges of a whole parameter."""
    return Piece(Sharding.whole(shape), cuts=((start, stop), (stop, torch.Size(shape).numel())), shards=SHARDS)


# -------------------------------------------------------------------- decay
def test_a_flat_range_decays_as_the_parameter_that_it_is_part_of() -> None:
    parts = {"weight": nn.Parameter(torch.ones(5)), "bias": nn.Parameter(torch.ones(3))}
    pieces = {"weight": cut((4, 3), 0, 5), "bias": cut((6,), 0, 3)}
    optimizer = Optimizer(parts, OptimizerConfig("adamw", lr=0.5, weight_decay=0.1), pieces=pieces)
    optimizer.step(0.5, {name: torch.zeros_like(part) for name, part in parts.items()})
    assert torch.equal(parts["weight"], torch.full((5,), 0.95)) and torch.equal(parts["bias"], torch.ones(3))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parts_are_updated_as_the_whole_is(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config, wide = OptimizerConfig(name, momentum=0.9), torch.promote_types(dtype, torch.float32)
    whole = nn.Parameter(torch.randn(5, 7).to(dtype))
    ranges = [(0, 4), (4, 4), (4, 35)]
    axes = [Axis("data", 3, rank, (0, 1, 2)) for rank in range(3)]
    pieces = [Piece(Sharding.whole((5, 7)), cuts=tuple(ranges), shards=axis) for axis in axes]
    parts = [nn.Parameter(piece.take(whole.detach().clone())) for piece in pieces]
    single = Optimizer({"w": whole}, config)
    several = [Optimizer({"w": p}, config, pieces={"w": piece}) for p, piece in zip(parts, pieces, strict=True)]
    for _ in range(3):
        gradient = torch.randn(5, 7, dtype=wide)
        single.step(0.1, {"w": gradient.clone()})
        for piece, optimizer in zip(pieces, several, strict=True):
            optimizer.step(0.1, {"w": piece.take(gradient.clone())})
    # Not to the bit: what is left of a vector register's width is added up in another order.
    tolerance = {"rtol": 1e-14 if wide == torch.float64 else 1e-6, "atol": 0.0}
    torch.testing.assert_close(
        torch.cat([main.detach() for o in several for main in o.main.values()]),
        single.main["w"].detach().flatten(),
        **tolerance,
    )
    assert all(torch.equal(o.main["w"].to(dtype), o.parameters["w"]) for o in several)
    expected = single.states()["w"]
    for key, tensor in expected.items():
        found = [optimizer.states()["w"][key] for optimizer in several]
        joined = found[0] if tensor.ndim == 0 else torch.cat(found)
        torch.testing.assert_close(joined, tensor.flatten() if tensor.ndim else tensor, **tolerance)


# -------------------------------------------------------------------- main weights
def narrow() -> tuple[nn.Parameter, Optimizer]:
    """A bfloat16 weight after a step that its rounded copy does not show."""
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = Optimizer({"w": parameter}, OptimizerConfig("sgd", weight_decay=0))
    optimizer.step(1e-4, {"w": torch.ones(8)})
    assert torch.equal(parameter, torch.ones(8)) and (optimizer.main["w"] < 1).all()
    return parameter, optimizer


def test_loaded_weights_are_the_main_weights_of_the_next_step() -> None:
    parameter, optimizer = narrow()
    loaded = torch.linspace(-3, 3, 8).bfloat16()
    with torch.no_grad():
        parameter.copy_(loaded)
    optimizer.step(0.0, {"w": torch.ones(8)})
    assert torch.equal(parameter, loaded) and torch.equal(optimizer.main["w"], loaded.float())


def test_loaded_weights_are_saved_before_the_next_step() -> None:
    parameter, optimizer = narrow()
    with torch.no_grad():
        parameter.fill_(3)
    assert torch.equal(optimizer.states()["w"]["main"], torch.full((8,), 3.0))


def test_main_weights_stay_where_the_optimizer_alone_writes() -> None:
    _, optimizer = narrow()
    for _ in range(200):
        optimizer.step(1e-5, {"w": torch.ones(8)})
    assert float(optimizer.main["w"][0]) == pytest.approx(1 - 1e-4 - 200 * 1e-5, rel=1e-5)


def test_a_write_that_changes_nothing_keeps_the_main_weight() -> None:
    """A gather after a step writes the same numbers again; only the number that was changed follows."""
    parameter, optimizer = narrow()
    before = optimizer.main["w"].detach().clone()
    with torch.no_grad():
        parameter.copy_(parameter.clone())
        parameter[3] = 5.0
    optimizer.step(0.0, {"w": torch.ones(8)})
    before[3] = 5.0
    assert torch.equal(optimizer.main["w"].detach(), before)


def test_a_filled_checkpoint_is_the_truth() -> None:
    parameter, optimizer = narrow()
    states = optimizer.states()
    with torch.no_grad():
        parameter.fill_(2)
        states["w"]["main"].fill_(2.001)
    optimizer.take_states()
    optimizer.step(0.0, {"w": torch.ones(8)})
    assert float(optimizer.main["w"][0]) == pytest.approx(2.001)


def test_a_range_of_a_parameter_in_a_buffer_follows_both() -> None:
    """ZeRO's layout: the parameter is a view of a buffer, what this rank updates a flat range of the parameter."""
    buffer = torch.ones(12, dtype=torch.bfloat16)
    parameter = nn.Parameter(buffer[2:8].view(2, 3))
    piece = cut((2, 3), 0, 4)
    part = nn.Parameter(piece.take(parameter.detach()))
    other = nn.Parameter(buffer[8:])
    optimizer = Optimizer({"w": part, "v": other}, OptimizerConfig("sgd", weight_decay=0), pieces={
        "w": piece, "v": Piece(Sharding.whole((4,)))})  # fmt: skip
    gradients = {"w": torch.ones(4), "v": torch.ones(4)}
    for _ in range(10):
        optimizer.step(1e-4, gradients)
    # One counter of writes for all of them: the write of one is no load of the other.
    assert float(optimizer.main["w"][0]) == pytest.approx(0.999) == float(optimizer.main["v"][0])
    with torch.no_grad():
        parameter.copy_(torch.full((2, 3), 4.0))
    optimizer.step(0.0, gradients)
    assert torch.equal(parameter, torch.full((2, 3), 4.0)) and torch.equal(optimizer.main["w"], torch.full((4,), 4.0))
    assert float(optimizer.main["v"][0]) == pytest.approx(0.999)
    buffer.fill_(5)
    optimizer.step(0.0, gradients)
    assert torch.equal(buffer, torch.full((12,), 5.0)) and torch.equal(optimizer.main["v"], torch.full((4,), 5.0))


def check_loaded_weights(sizes: dict[str, int]) -> list[float]:
    with Grid.create(**sizes) as grid:
        model = GPT(FAMILIES["llama"], grid, seed=0, dtype=torch.bfloat16)
        engine = TrainingEngine(model, grid, OptimizerConfig(weight_decay=0.1))
        other = full_state_dict(GPT(FAMILIES["llama"], grid, seed=1, dtype=torch.bfloat16), grid)
        load_full_state_dict(model, other, grid)
        losses = []
        for _ in range(2):
            losses.append(engine.forward_backward([global_batch(Case(), 0)]).loss)
            engine.step(0.0)
            found = full_state_dict(model, grid)
            assert all(torch.equal(found[name], other[name]) for name in other)
        return losses


@pytest.mark.case(9)
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}], ids=str)
def test_a_step_at_rate_zero_keeps_loaded_weights(sizes: dict[str, int]) -> None:
    for first, second in run_ranks(check_loaded_weights, sizes.get("tensor", 1), sizes):
        assert first == second


# -------------------------------------------------------------------- foreign optimizers
class Whole(torch.optim.SGD):
    """Looks at whole tensors."""


class Numbers(torch.optim.SGD):
    elementwise = True


PARTS: dict[str, Any] = {"w": cut((4, 3), 0, 5)}


@pytest.mark.parametrize("build", [Numbers, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_an_elementwise_optimizer_updates_flat_ranges(build: Any) -> None:
    part = nn.Parameter(torch.ones(5))
    optimizer = Optimizer({"w": part}, OptimizerConfig(), lambda groups: build(groups, lr=0.1), PARTS)
    optimizer.step(0.1, {"w": torch.ones(5)})
    assert (part < 1).all()


@pytest.mark.parametrize("build", [Whole, torch.optim.Adafactor])
def test_another_is_refused_by_name_where_tensors_are_cut(build: Any) -> None:
    part = nn.Parameter(torch.ones(5))
    with pytest.raises(JobError, match=rf"{build.__name__}.*w, a flat range.*data_parallel.zero=0.*elementwise = True"):
        Optimizer({"w": part}, OptimizerConfig(), lambda groups: build(groups, lr=0.1), PARTS)
    whole = {"w": Piece(Sharding.whole((5,)), shards=SHARDS)}
    Optimizer({"w": part}, OptimizerConfig(), lambda groups: build(groups, lr=0.1), whole)
