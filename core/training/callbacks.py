"""Callbacks that come with the trainer, and how a run calls them.

The moments, in order: ``on_start``; for each step ``on_step_start``, ``on_step_end``, then ``on_evaluate`` and
``on_save`` where the step has them; ``on_end``, whatever happened before. ``gridtron.core.training.protocols.Callback``
describes each.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.errors import JobError
from gridtron.core.precision import LOWEST_SCALE
from gridtron.core.training.protocols import Callback, RunInfo


class BaseCallback:
    """Every moment, doing nothing: derive from it and write those you need."""

    def on_start(self, run: RunInfo, step: int) -> None:
        pass

    def on_step_start(self, step: int) -> None:
        pass

    def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
        pass

    def on_evaluate(self, step: int, row: Mapping[str, Any]) -> None:
        pass

    def on_save(self, step: int, path: str) -> None:
        pass

    def on_end(self, step: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class CallbackError(RuntimeError):
    """A callback raised: the run fails, and says whose fault it was."""


class Callbacks:
    """Calls every callback at a moment, in the order of registration."""

    def __init__(self, callbacks: Sequence[Callback]):
        self.callbacks = list(callbacks)

    def call(self, moment: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            with _named(callback, moment):
                getattr(callback, moment)(*arguments)

    def end(self, step: int) -> None:
        """``on_end`` of all, also where one of them raises; the first that raised is told."""
        fault: Exception | None = None
        for callback in self.callbacks:
            try:
                with _named(callback, "on_end"):
                    callback.on_end(step)
            except Exception as error:
                fault = fault or error
        if fault is not None:
            raise fault

    def state_dict(self) -> dict[str, Any]:
        """States of those that have one, under the names of their classes, numbered where a class comes twice."""
        states = {}
        for name, callback in self._by_name():
            with _named(callback, "state_dict"):
                if state := callback.state_dict():
                    json.dumps(state)  # told here, by name: what JSON cannot hold
                    states[name] = state
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for name, callback in self._by_name():
            if name in states:
                if not isinstance(states[name], dict):
                    raise CheckpointError(
                        f"what the checkpoint holds of the callback {name} is {states[name]!r:.80} and should be an "
                        "object; use another checkpoint",
                        agreed=True,
                    )
                with _named(callback, "load_state_dict"):
                    callback.load_state_dict(states[name])

    def _by_name(self) -> Iterator[tuple[str, Callback]]:
        seen: dict[str, int] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}-{seen[name]}"), callback


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise JobError(f"{folder} is a file, and a run keeps a folder there: move it away") from None


@contextmanager
def _named(callback: Callback, moment: str) -> Iterator[None]:
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        raise CallbackError(f"the callback {type(callback).__qualname__} failed in {moment}: {error!r}") from error


class StopOnNonFinite(BaseCallback):
    """Ends the run after steps in a row whose gradient was not finite; every rank counts the same rows.

    A step that is skipped to find a loss scale, under a scale above the lowest, does not count.

    Args:
        limit: so many in a row; 0: never.
        first: stop at the first of them (``train.on_nonfinite=stop``).
        searches_scale: the loss scale of rows halves with every skipped step.
    """

    def __init__(self, limit: int, first: bool = False, searches_scale: bool = False):
        self.limit = 1 if first else limit
        self.searches_scale = searches_scale
        self.count = 0

    def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
        searching = self.searches_scale and row.get("loss_scale", LOWEST_SCALE) > LOWEST_SCALE
        self.count = self.count + 1 if row.get("skipped") and not searching else 0
        if self.limit and self.count >= self.limit:
            steps = "step" if self.count == 1 else f"{self.count} steps in a row"
            raise JobError(
                f"the gradient of the last {steps} (to step {step}) was not finite{_at_scale(row)}, "
                "and the weights did not change; "
                "lower optimizer.lr, lengthen lr_schedule.warmup_steps, or look at the data of these steps; "
                "train.on_nonfinite=skip and train.max_nonfinite say when a run stops",
                agreed=True,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} if self.count else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        count = state.get("count")
        if type(count) is not int or not 0 <= count < 1 << 62:
            raise CheckpointError(
                f"the checkpoint's number of steps that were not finite is {count!r:.80}; use another", agreed=True
            )
        self.count = count


def _at_scale(row: Mapping[str, Any]) -> str:
    return f" under the loss scale {row['loss_scale']:g}" if "loss_scale" in row else ""


class GarbageCollection(BaseCallback):
    """Collects Python's garbage every so many steps and at no other time, on all ranks at the same step.

    A collection that begins on one rank alone makes the others wait for it in their next collective.
    """

    def __init__(self, every: int):
        assert every > 0, every
        self.every = every
        self._was_enabled = True

    def on_start(self, run: RunInfo, step: int) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()

    def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
        if step % self.every == 0:
            gc.collect()

    def on_end(self, step: int) -> None:
        if self._was_enabled:
            gc.enable()


class ProfilerWindow(BaseCallback):
    """Records steps ``first`` to ``last`` with torch.profiler into ``profile/rank-N.json`` of the run.

    The file opens in Perfetto or chrome://tracing.
    """

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self._profiler: Any = None
        self._run: RunInfo | None = None

    def on_start(self, run: RunInfo, step: int) -> None:
        self._run = run

    def on_step_start(self, step: int) -> None:
        if step == self.first:
            import torch
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()

    def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
        if step == self.last:
            self._write()

    def on_end(self, step: int) -> None:
        self._write()

    def _write(self) -> None:
        if self._profiler is None:
            return
        assert self._run is not None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = Path(self._run.directory) / "profile"
        _make_folder(folder)
        profiler.export_chrome_trace(str(folder / f"rank-{self._run.rank}.json"))


class StackDump(BaseCallback):
    """Writes where every thread stands, on SIGUSR2 and when a step takes longer than ``timeout``.

    To ``stacks/rank-N.txt`` of the run, by C code, so that a rank that waits inside a collective writes too. After
    SIGUSR2 the same goes to standard error, as soon as the rank is back in Python.

    Args:
        timeout: seconds a step may take before its rank writes; the run goes on.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._file: TextIO | None = None
        self._before: Any = None
        self._registered = False

    def on_start(self, run: RunInfo, step: int) -> None:
        folder = Path(run.directory) / "stacks"
        _make_folder(folder)
        path = folder / f"rank-{run.rank}.txt"
        self._file = path.open("a")
        if not hasattr(signal, "SIGUSR2") or threading.current_thread() is not threading.main_thread():
            return

        def show(number: int, frame: FrameType | None) -> None:
            stack = "".join(traceback.format_stack(frame))
            sys.stderr.write(f"rank {run.rank} (all threads: {path}):\n{stack}")
            sys.stderr.flush()

        self._before = signal.signal(signal.SIGUSR2, show)
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True, chain=True)
        self._registered = True

    def on_step_start(self, step: int) -> None:
        assert self._file is not None
        faulthandler.dump_traceback_later(self.timeout, file=self._file)

    def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
        faulthandler.cancel_dump_traceback_later()

    def on_end(self, step: int) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._registered:
            faulthandler.unregister(signal.SIGUSR2)
            signal.signal(signal.SIGUSR2, self._before)
            self._registered = False
        if self._file is not None:
            self._file.close()
            self._file = None
