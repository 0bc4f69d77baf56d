"""Engines of a :class:`parity.Case` in any number format, for tests that look inside a run and not at its end alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from parity import Case, global_batch, split
from torch import Tensor, nn

from gridtron.core import Grid
from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.data.batch import Batch
from gridtron.core.pieces import gather_whole
from gridtron.core.precision import LossScaler
from gridtron.core.training.protocols import StepOutcome
from gridtron.models import GPT
from gridtron.parallel.data_parallel.config import DataParallelConfig
from gridtron.parallel.engine import TrainingEngine
from gridtron.parallel.pipeline import build_schedule


def build_engine(
    case: Case, grid: Grid, dtype: torch.dtype = torch.float64, scaler: LossScaler | None = None, seed: int = 7
) -> TrainingEngine:
    """The engine that trains ``case`` on this rank."""
    stages: dict[str, Any] = {}
    schedule = None
    if case.schedule is not None:
        schedule = build_schedule(case.schedule, grid.pipeline.size, count_of(case, grid), case.chunks)
        stages = {"num_stages": schedule.num_stages, "placement": schedule.placement}
    model = GPT(case.config, grid, **stages, layers_per_stage=case.layers_per_stage, seed=seed, dtype=dtype)
    if case.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(case.frozen))
    options = DataParallelConfig(case.zero, case.bucket_bytes, case.shard_size, case.reduce)
    return TrainingEngine(model, grid, case.optimizer, options, schedule=schedule, loss_scaler=scaler)


def count_of(case: Case, grid: Grid) -> int:
    """Microbatches of a step on each data rank."""
    return max(1, case.global_batch_size // grid.data.size // case.micro_batch_size)


def microbatches_of(case: Case, grid: Grid, step: int) -> list[Batch]:
    """This data rank's part of a step."""
    own = split(global_batch(case, step), grid.data.size)[grid.data.rank]
    return split(own, count_of(case, grid))


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
