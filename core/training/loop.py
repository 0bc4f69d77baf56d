"""The training loop: reads, steps, logs, evaluates, saves. It knows an engine and a grid, no layer and no schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gridtron.core.checkpoint.layout import CheckpointError, step_path
from gridtron.core.checkpoint.load import load
from gridtron.core.checkpoint.save import save
from gridtron.core.training.callbacks import Callbacks
from gridtron.core.training.metrics import StepTimer, Work, count_tokens
from gridtron.core.training.protocols import Engine, Logger, RunInfo

if TYPE_CHECKING:
    from gridtron.core.data.batch import Batch
    from gridtron.core.grid import Grid


class TrainingData(Protocol):
    """This rank's part of the training data, read by position."""

    def microbatches(self, position: int) -> Sequence[Batch]: ...

    def next_position(self, position: int) -> int: ...


@dataclass(frozen=True)
class Progress:
    """How far a run is. Saved with every checkpoint.

    Args:
        step: steps done.
        position: where the next step reads in the data.
        tokens: unignored tokens trained on.
    """

    step: int = 0
    position: int = 0
    tokens: int = 0


@dataclass
class TrainingLoop:
    """Trains to the last step of the run, or to ``stop_after``.

    Args:
        engine: runs one step's mathematics.
        data: microbatches of this rank.
        grid: of the run.
        directory: of the run: checkpoints are written under it.
        learning_rate: of a step, counted from 1.
        total_steps: of the whole run.
        stop_after: ends cleanly, with a checkpoint, after this step; None: goes to the end.
        evaluation: held-out microbatches of this rank; None: no evaluation.
        evaluate_every: steps between evaluations; 0: none.
        save_every: steps between checkpoints; 0: one at the end.
        callbacks: called on every rank.
        loggers: given rows on rank 0.
        work: what throughput is held against.
    """

    engine: Engine
    data: TrainingData
    grid: Grid
    directory: Path
    learning_rate: Callable[[int], float]
    total_steps: int
    stop_after: int | None = None
    evaluation: Iterable[Batch] | None = None
    evaluate_every: int = 0
    save_every: int = 0
    callbacks: Callbacks = field(default_factory=lambda: Callbacks([]))
    loggers: Sequence[Logger] = ()
    work: Work = field(default_factory=lambda: Work(0.0, None, 1))
    progress: Progress = field(default_factory=Progress)
    _saved: int | None = None

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def last_step(self) -> int:
        """The step after which this start of the run ends."""
        return min(self.total_steps, self.stop_after or self.total_steps)

    # ---------------------------------------------------------------- resuming
    def resume(self, path: Path, own: bool = True) -> None:
        """Takes up the state of the checkpoint ``path``.

        Args:
            path: of a complete checkpoint.
            own: it is one of this run's, so it need not be written again.

        Raises:
            CheckpointError: it does not fit, or is damaged.
        """
        state = self.engine.state_dict()
        extra = load(path, state, self.grid)
        self.engine.load_state_dict(state)
        try:
            progress = {name: extra["progress"][name] for name in ("step", "position", "tokens")}
            if not all(type(value) is int and value >= 0 for value in progress.values()):
                raise ValueError(f"progress is {progress}")
            states = extra["callbacks"]
            self.progress = Progress(**progress)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} does not say how far its run was ({error!r}); use another", agreed=True
            ) from None
        self.callbacks.load_state_dict(states)
        self._saved = self.progress.step if own else None

    # ---------------------------------------------------------------- running
    def run(self) -> Progress:
        """Runs steps until :attr:`last_step`; the end of a run and a stop are always saved."""
        run = RunInfo(
            self.grid.rank, self.grid.world_size, str(self.directory), self.total_steps, self.grid.coordinate()
        )
        self.callbacks.call("on_start", run, self.progress.step)
        try:
            while self.progress.step < self.last_step:
                self._step()
        except BaseException as error:
            try:
                self.callbacks.end(self.progress.step)
            except Exception as other:
                error.add_note(f"and then: {other}")
            raise
        self.callbacks.end(self.progress.step)
        return self.progress

    def _step(self) -> None:
        step = self.progress.step + 1
        timer = StepTimer(self.grid.device, self.work)
        self.callbacks.call("on_step_start", step)
        timer.start()
        microbatches = self.data.microbatches(self.progress.position)
        loss = self.engine.forward_backward(microbatches)
        rate = self.learning_rate(step)
        outcome = self.engine.step(rate)
        cost = timer.stop(loss.tokens, count_tokens(microbatches) * self.grid.data.size)
        self.progress = Progress(
            step, self.data.next_position(self.progress.position), self.progress.tokens + loss.tokens
        )
        row: dict[str, Any] = {
            "step": step,
            "loss": loss.loss,
            "grad_norm": outcome.grad_norm,
            "lr": rate,
            "tokens": self.progress.tokens,
            **cost,
        }
        if outcome.loss_scale is not None:
            row["loss_scale"] = outcome.loss_scale
        if outcome.grad_norms is not None:
            row["grad_norms"] = dict(outcome.grad_norms)
        if not outcome.applied:
            row["skipped"] = True
        self._log(row)
        self.callbacks.call("on_step_end", step, row)
        if (
            self.evaluation is not None
            and self.evaluate_every
            and (step % self.evaluate_every == 0 or step == self.total_steps)
        ):
            self._evaluate(step)
        if step == self.last_step or (self.save_every and step % self.save_every == 0):
            self.save()

    def _evaluate(self, step: int) -> None:
        assert self.evaluation is not None
        found = self.engine.evaluate(self.evaluation)
        row = {"step": step, "eval_loss": found.loss, "eval_tokens": found.tokens}
        self._log(row)
        self.callbacks.call("on_evaluate", step, row)

    def save(self) -> None:
        """Writes a checkpoint of this moment, unless there is one."""
        step = self.progress.step
        if self._saved == step:
            return
        path = step_path(self.checkpoints, step)
        extra = {"progress": dataclasses.asdict(self.progress), "callbacks": self.callbacks.state_dict()}
        save(path, self.engine.state_dict(), extra, self.grid)
        self._saved = step
        self.callbacks.call("on_save", step, str(path))

    # ---------------------------------------------------------------- telling
    def _log(self, row: Mapping[str, Any]) -> None:
        if self.grid.rank == 0:
            for logger in self.loggers:
                logger.log(row)
