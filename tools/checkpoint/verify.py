"""``gridtron checkpoint verify``: every byte against its checksum; and, where asked for, the damaged put back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.checkpoint.repair import FileBlock, FileState, Repair, check_files
from gridtron.core.checkpoint.stored import Stored
from gridtron.core.options import option
from gridtron.tools.checkpoint.opening import check_report, console, open_checkpoint, printable, write_report

_SHOWN = 7
"""Lines on damage before the rest is counted; a report holds all."""


@dataclass(frozen=True)
class VerifyOptions:
    path: str | None = option(None, "a checkpoint, its run's folder or its checkpoints folder", path=True)
    repair: bool = option(False, "rewrite damaged files from copies of their bytes (checkpoint.copies)")
    out: str | None = option(None, "JSON file for what was found", path=True)


def run(options: VerifyOptions) -> int:
    """0 where every byte is what was written, or was put back; else 1."""
    try:
        stored = open_checkpoint(options.path, damaged=True).stored
    except CheckpointError as error:
        write_report(options.out, {"sound": False, "faults": [str(error)]})
        print(f"damaged: {printable(str(error), 1000)}")
        return 1
    check_report(options.out, stored)
    with _progress("verifying", _bytes(stored, list(stored.manifest.files))) as advance:
        states = check_files(stored, advance=advance)
    damaged = [state for state in states if not state.sound]
    lines = [line for state in damaged for line in _lines(stored, state)]
    repaired: list[str] = []
    if options.repair and damaged:
        repaired, left = _repair(stored, states)
        lines = left if repaired else [*lines, *left]
    sound = len(repaired) == len(damaged)
    write_report(options.out, _report(stored, states, repaired, lines if not sound else []))
    _tell(stored, sound, repaired, lines)
    return 0 if sound else 1


def _repair(stored: Stored, states: Sequence[FileState]) -> tuple[list[str], list[str]]:
    """Names of the files that were rewritten and found sound; what is to be told of the others."""
    repair = Repair(stored, states)
    repaired, told = [], []
    for state in states:
        if state.sound:
            continue
        lost = repair.lost(state)
        if lost:
            told.append(f"{state.name} was left as it is: {_where(lost[0])} is sound in no other file{_more(lost)}")
            continue
        try:
            repair.rewrite(state)
        except (CheckpointError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            told.append(f"{state.name} was left as it is: {reason}")
            continue
        with _progress(f"verifying {state.name}", _bytes(stored, [state.name])) as advance:
            again = check_files(stored, [state.name], advance)[0]
        if again.sound:
            repaired.append(state.name)
        else:
            told += _lines(stored, again)
    return repaired, told


def _few(names: Collection[str]) -> str:
    """The one name, or how many there are."""
    return f"{len(names):,} files" if len(names) != 1 else next(iter(names))


def _more(lost: Sequence[FileBlock]) -> str:
    return f", and {len(lost) - 1} places more" if len(lost) > 1 else ""


def _where(block: FileBlock) -> str:
    return f"{block.tensor} (bytes {block.first:,} to {block.stop:,})"


def _lines(stored: Stored, state: FileState) -> list[str]:
    """What is wrong with a file: itself, then its tensors with the bytes of each."""
    lines = [state.fault] if state.fault else []
    # Of a file that is not there, every tensor is gone; its fault says so.
    whole = state.fault is not None and len(state.damaged) == len(
        [number for _, _, piece in stored.manifest.places(state.name) for number in piece.checksums]
    )
    return lines if whole else [*lines, *(f"{state.name}: {_where(block)}" for block in state.damaged)]


def _bytes(stored: Stored, names: Sequence[str]) -> int:
    return sum(stored.manifest.files[name] for name in names)


def _report(
    stored: Stored, states: Sequence[FileState], repaired: Sequence[str], faults: Sequence[str]
) -> dict[str, Any]:
    return {
        "path": str(stored.path),
        "sound": not faults,
        "bytes": _bytes(stored, list(stored.manifest.files)),
        "repaired": list(repaired),
        "faults": list(faults),
        "files": {
            state.name: {
                "fault": state.fault,
                "damaged": [
                    {"tensor": block.tensor, "first": block.first, "stop": block.stop} for block in state.damaged
                ],
            }
            for state in states
        },
    }


def _tell(stored: Stored, sound: bool, repaired: Sequence[str], lines: Sequence[str]) -> None:
    manifest = stored.manifest
    size = f"{len(manifest.tensors):,} tensors, {sum(manifest.files.values()):,} bytes in {_few(manifest.files)}"
    screen = console()

    def say(text: str) -> None:
        screen.print(printable(text, 1000), soft_wrap=True)

    for name in repaired[:2]:
        say(f"repaired: {name} was written anew from the files that hold the same bytes")
    if len(repaired) > 2:
        say(f"repaired: {len(repaired) - 2} files more")
    if sound:
        say(f"sound: {stored.path} ({size})")
        return
    say(f"damaged: {stored.path} ({size})")
    for line in lines[:_SHOWN]:
        say(f"  {line}")
    if len(lines) > _SHOWN:
        say(f"  and {len(lines) - _SHOWN:,} more; out=FILE.json has all")


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], Any]]:
    """A bar by bytes on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
