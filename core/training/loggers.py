"""Where rows go on rank 0: the run's ``metrics.jsonl``, the console, TensorBoard."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from gridtron.core.training.metrics import format_row


class JsonLinesLogger:
    """Appends each row as one line, written at once, so that a reader never sees half a row but at a crash."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        # A line that a crash cut off would swallow the next one.
        if self._file.tell() and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")

    def log(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(format_row(row) + "\n")
            self._file.flush()
        except OSError as error:
            # What fails in a write does not say which file it was.
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def close(self) -> None:
        if self._file.closed:
            return
        # A row that found no room is still waiting, and finds none now; it was told when it was logged.
        with contextlib.suppress(OSError):
            self._file.flush()
            os.fsync(self._file.fileno())
        with contextlib.suppress(OSError):
            self._file.close()


class TensorBoardLogger:
    """Every number of a row as a scalar under ``train/`` or ``evaluation/``, at its step; norms by name apart.

    Args:
        directory: of the event files.
        first_step: events of an earlier start from this step on are hidden, as their rows were cut.
    """

    def __init__(self, directory: Path, first_step: int = 0):
        # The writer alone, without the tensorboard package's server and without pandas.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step or None)

    def log(self, row: Mapping[str, Any]) -> None:
        prefix = "train" if "grad_norm" in row else "evaluation"
        for key, value in row.items():
            if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(f"{prefix}/{key}", value, row["step"])
        for name, norm in row.get("grad_norms", {}).items():
            self._writer.add_scalar(f"grad_norms/{name}", norm, row["step"])

    def close(self) -> None:
        self._writer.close()


def describe_row(row: Mapping[str, Any], total_steps: int) -> str:
    """A row in words, for a person."""
    if "grad_norm" not in row:
        return f"step {row['step']}/{total_steps}  evaluation: loss {row['eval_loss']:.4f}"
    scale = f" under the loss scale {row['loss_scale']:g}" if "loss_scale" in row else ""
    skipped = f"  gradient not finite{scale}: step skipped" if row.get("skipped") else ""
    return (
        f"step {row['step']}/{total_steps}  loss {row['loss']:.4f}  norm {row['grad_norm']:.3g}  lr {row['lr']:.3g}  "
        f"{_rate(row['tokens_per_second'])} tokens/s{skipped}"
    )


def time_left(seconds: float) -> str:
    """Hours, minutes and seconds of a remaining time."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _rate(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


class ConsoleLogger:
    """A bar with loss, tokens per second and time left on a terminal; plain lines elsewhere.

    Args:
        total_steps: of the run.
        done: steps done before.
        every: steps between plain lines.
        stream: default standard error, so that a command's own output stays clean.
    """

    def __init__(self, total_steps: int, done: int = 0, every: int = 1, stream: TextIO | None = None):
        self._total = total_steps
        self._every = every
        self._stream = stream or sys.stderr
        self._seconds, self._logged = 0.0, 0
        self._bar: Any = None
        if getattr(self._stream, "isatty", lambda: False)():
            self._bar, self._task = self._make_bar(done)
        self._shown = time.monotonic()

    def _make_bar(self, done: int) -> tuple[Any, Any]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            console=Console(file=self._stream),
        )
        bar.start()
        return bar, bar.add_task("", total=self._total, completed=done, shown="")

    def log(self, row: Mapping[str, Any]) -> None:
        if "grad_norm" in row:
            # The first step compiles, allocates and reads cold files: it says little of the rest.
            seconds = row["step_seconds"]
            self._logged += 1
            self._seconds = seconds if self._logged <= 2 else 0.8 * self._seconds + 0.2 * seconds
        if self._bar is not None:
            self._log_bar(row)
        elif "grad_norm" not in row or row["step"] % self._every == 0 or row["step"] in (1, self._total):
            self.note(describe_row(row, self._total) + self._left(row))

    def _left(self, row: Mapping[str, Any]) -> str:
        left = (self._total - row["step"]) * self._seconds
        return f"  {time_left(left)} left" if "grad_norm" in row and row["step"] < self._total else ""

    def _log_bar(self, row: Mapping[str, Any]) -> None:
        if "grad_norm" not in row:
            self._bar.console.print(describe_row(row, self._total), highlight=False)
            return
        shown = f"loss {row['loss']:.4f}  {_rate(row['tokens_per_second'])} tokens/s{self._left(row)}"
        self._bar.update(self._task, completed=row["step"], shown=shown)

    def note(self, text: str) -> None:
        """A line between the rows."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def show_grid(
    sizes: Mapping[str, int], order: tuple[str, ...], facts: Mapping[str, str], stream: TextIO | None = None
) -> None:
    """The grid as a table, outermost axis first, and a few facts of the run under it.

    Args:
        sizes: of the axes.
        order: of the axes, outermost first.
        facts: what else a person wants to see at the start.
        stream: default standard error.
    """
    stream = stream or sys.stderr
    if not getattr(stream, "isatty", lambda: False)():
        product = " x ".join(f"{name} {sizes[name]}" for name in order)
        stream.write("grid: " + product + "".join(f"\n{name}: {value}" for name, value in facts.items()) + "\n")
        stream.flush()
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="grid", title_justify="left")
    for name in order:
        table.add_column(name, justify="right")
    table.add_row(*(str(sizes[name]) for name in order))
    console = Console(file=stream)
    console.print(table)
    for name, value in facts.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
