"""The training loop: reads, steps, logs, evaluates, saves. It knows an engine and a grid, no layer and no schedule."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gridtron.core.checkpoint.layout import CheckpointError, step_path
from gridtron.core.checkpoint.load import load_part
from gridtron.core.checkpoint.saver import Saver
from gridtron.core.training.agreement import Agreement, Question
from gridtron.core.training.callbacks import Callbacks
from gridtron.core.training.interruption import Interruption
from gridtron.core.training.metrics import StepTimer, Work, count_tokens
from gridtron.core.training.protocols import Engine, Logger, RunInfo

if TYPE_CHECKING:
    from gridtron.core.data.batch import Batch
    from gridtron.core.grid import Grid


_LAST_SAVE = 20.0
"""Seconds that a run which failed gives to the save that goes on behind it."""


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
        saver: writes them; default while the run waits.
        described: further JSON values that every checkpoint holds (the run's plan).
        interruption: tells that this rank was asked to stop.
        strict: names that only a checkpoint or only this run has are an error when it resumes.
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
    saver: Saver | None = None
    described: Mapping[str, Any] = field(default_factory=dict)
    interruption: Interruption = field(default_factory=Interruption)
    strict: bool = True
    callbacks: Callbacks = field(default_factory=lambda: Callbacks([]))
    loggers: Sequence[Logger] = ()
    work: Work = field(default_factory=lambda: Work(0.0, None, 1))
    progress: Progress = field(default_factory=Progress)
    left_out: tuple[str, ...] = ()
    stopped_by: signal.Signals | None = None
    _saved: int | None = None
    _metrics: dict[str, float] = field(default_factory=dict)
    _unannounced: tuple[int, Path] | None = None

    def __post_init__(self) -> None:
        self._saver = self.saver or Saver(self.grid)
        self._agreement = Agreement(self.grid)

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
        loaded = load_part(path, state, self.grid, strict=self.strict)
        self.engine.load_state_dict(state)
        extra, self.left_out = loaded.extra, loaded.left_out
        try:
            progress = {name: extra["progress"][name] for name in ("step", "position", "tokens")}
            if not all(type(value) is int and 0 <= value < 1 << 62 for value in progress.values()):
                raise ValueError(f"progress is {progress}")
            states, metrics = dict(extra["callbacks"]), dict(extra.get("metrics", {}))
            self._metrics = {str(name): float(value) for name, value in metrics.items()}
            self.progress = Progress(**progress)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{path} does not say how far its run was ({error!r:.200}); use another", agreed=True
            ) from None
        self.callbacks.load_state_dict(states)
        self._saved = self.progress.step if own else None

    # ---------------------------------------------------------------- running
    def run(self) -> Progress:
        """Runs steps until :attr:`last_step`, or until a rank was asked to stop (:attr:`stopped_by` then says by which
        signal); the end of a run and a stop are always saved."""
        run = RunInfo(
            self.grid.rank, self.grid.world_size, str(self.directory), self.total_steps, self.grid.coordinate()
        )
        self.callbacks.call("on_start", run, self.progress.step)
        try:
            self._heed(self._ask().wait().stop)
            while self.progress.step < self.last_step and self.stopped_by is None:
                self._step()
            self._settle()
        except BaseException as error:
            self._saver.abandon(_LAST_SAVE)
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
        # Asked before the optimizer's work, and answered behind it: a signal that came by now is heeded in this step.
        question = self._ask()
        outcome = self.engine.step(rate)
        answer = question.wait()
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
        self._metrics["loss"] = loss.loss
        self._log(row)
        self.callbacks.call("on_step_end", step, row)
        if (
            self.evaluation is not None
            and self.evaluate_every
            and (step % self.evaluate_every == 0 or step == self.total_steps)
        ):
            self._evaluate(step)
        if answer.saved:
            self._settle()
        self._heed(answer.stop)
        if step == self.last_step or self.stopped_by or (self.save_every and step % self.save_every == 0):
            self.save()

    def _ask(self) -> Question:
        return self._agreement.ask(int(self.interruption.asked or 0), self._saver.finished)

    def _heed(self, stop: int) -> None:
        if stop and self.progress.step < self.last_step:
            self.stopped_by = signal.Signals(stop)

    def _evaluate(self, step: int) -> None:
        assert self.evaluation is not None
        found = self.engine.evaluate(self.evaluation)
        row = {"step": step, "eval_loss": found.loss, "eval_tokens": found.tokens}
        self._metrics["eval_loss"] = found.loss
        self._log(row)
        self.callbacks.call("on_evaluate", step, row)

    def save(self) -> None:
        """Writes a checkpoint of this moment, or begins to, unless there is one."""
        step = self.progress.step
        if self._saved == step:
            return
        self._settle()
        path = step_path(self.checkpoints, step)
        extra = {
            **self.described,
            "progress": dataclasses.asdict(self.progress),
            "metrics": dict(self._metrics),
            "callbacks": self.callbacks.state_dict(),
        }
        self._saver.save(path, self.engine.state_dict(), extra)
        self._saved = step
        self._unannounced = (step, path)
        if not self._saver.busy:
            self._settle()

    def _settle(self) -> None:
        """Waits until the checkpoint that was begun is complete on the disk, by all ranks, and tells of it."""
        self._saver.wait()
        if self._unannounced is not None:
            (step, path), self._unannounced = self._unannounced, None
            self.callbacks.call("on_save", step, str(path))

    # ---------------------------------------------------------------- telling
    def _log(self, row: Mapping[str, Any]) -> None:
        if self.grid.rank == 0:
            for logger in self.loggers:
                logger.log(row)
