"""Engines of a :class:`parity.Case` in any number format, for tests that look inside a run and not at its end alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from parity import Case, microbatches_of
from torch import Tensor, nn

from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.pieces import gather_whole
from gridtron.core.training.protocols import StepOutcome
from gridtron.parallel.engine import TrainingEngine


def train(engine: TrainingEngine, case: Case, steps: Sequence[int]) -> tuple[list[float], list[StepOutcome]]:
    """The losses and the outcomes of some steps."""
    losses, outcomes = [], []
    for step in steps:
        losses.append(engine.forward_backward(microbatches_of(case, engine.grid, step)).loss)
        outcomes.append(engine.step(case.optimizer.lr))
    return losses, outcomes


def whole_state(engine: TrainingEngine) -> dict[str, Tensor]:
    """Every tensor of this rank's stages that a checkpoint has, whole: gathered as each view says it lies."""
    axes = {f"parameters/{item.name}": item.axis for item in engine.parameters}
    found = {}
    for name, view in engine.state_dict().items():
        found[name] = whole_of(view, axes.get("parameters/" + name.split("/")[1], engine.grid.tensor))
    return found


def whole_of(view: ShardedTensorView, axis: Any) -> Tensor:
    if view.piece is not None:
        return view.piece.gather_whole(view.local).clone()
    return gather_whole(view.local, view.sharding, axis).clone()


def together(results: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One state from those of all ranks, which agree to the bit on what several have."""
    found: dict[str, Tensor] = {}
    for result in results:
        for name, tensor in result.items():
            assert tensor.dtype == found.setdefault(name, tensor).dtype
            assert torch.equal(tensor, found[name]), f"ranks differ in {name}"
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, formats and bits."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), f"{name} differs by {float((found[name] - tensor).abs().max())}"


def modules_of(engine: TrainingEngine, kind: type[nn.Module]) -> list[nn.Module]:
    """This rank's modules of a kind."""
    return [module for module in engine.model.modules() if isinstance(module, kind)]
