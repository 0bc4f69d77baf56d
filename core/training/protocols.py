"""What the loop, the engine, callbacks and loggers ask of one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gridtron.core.checkpoint.tensors import ShardedTensorView
    from gridtron.core.data.batch import Batch


@dataclass(frozen=True)
class LossSum:
    """Loss of a step or an evaluation over the whole grid, the same value on every rank.

    Args:
        loss: mean over the unignored tokens; 0.0 where there are none.
        tokens: the number of those tokens.
    """

    loss: float
    tokens: int


@dataclass(frozen=True)
class StepOutcome:
    """What an optimizer step did, the same on every rank.

    Args:
        grad_norm: of all parameters, each counted once, before clipping.
        applied: False where a non-finite gradient made every rank skip the step.
        loss_scale: under which the step's gradients were made; None where losses are not scaled.
        grad_norms: of each layer or parameter by name, where the run asks for them.
    """

    grad_norm: float
    applied: bool
    loss_scale: float | None = None
    grad_norms: Mapping[str, float] | None = None


class Engine(Protocol):
    """Runs one step's mathematics on this rank's part of the grid."""

    def forward_backward(self, microbatches: Sequence[Batch]) -> LossSum:
        """Gradients of the mean loss over the unignored tokens of the global batch, reduced and ready."""
        ...

    def step(self, lr: float) -> StepOutcome:
        """Norm, clipping, optimizer step at the rate ``lr``; gradients are empty afterwards."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> LossSum:
        """Mean loss over ``batches`` of all data ranks, without gradients."""
        ...

    def state_dict(self) -> Mapping[str, ShardedTensorView]:
        """Every tensor of the run's state under its grid-independent name: ``parameters/NAME``,
        ``optimizer/NAME/exp_avg``, ..."""
        ...

    def load_state_dict(self, state: Mapping[str, ShardedTensorView]) -> None:
        """Takes back what :meth:`state_dict` gave, after its tensors were filled in place."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """What callbacks and loggers may know of a run; the same on every rank but ``rank``."""

    rank: int
    world_size: int
    directory: str
    total_steps: int
    coordinate: Mapping[str, int]


class Callback(Protocol):
    """Moments of a run. Every rank calls them, in the order of registration; a callback may keep state
    (``state_dict`` and ``load_state_dict`` are saved with checkpoints, as JSON)."""

    def on_start(self, run: RunInfo, step: int) -> None:
        """Before the first step; ``step`` is the number of steps done before (0 in a new run)."""

    def on_step_start(self, step: int) -> None:
        """Before the data of step ``step`` (from 1) is read."""

    def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
        """After the optimizer step, with the row that is logged."""

    def on_evaluate(self, step: int, row: Mapping[str, Any]) -> None:
        """After an evaluation, with its row."""

    def on_save(self, step: int, path: str) -> None:
        """After a checkpoint is complete on disk."""

    def on_end(self, step: int) -> None:
        """After the last step, also when the run stops early or fails."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Logger(Protocol):
    """Takes rows on rank 0."""

    def log(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...
