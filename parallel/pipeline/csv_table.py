"""Schedules as files: one row a rank, one cell a step, cells as ``2F0``."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.schedule import Schedule

_OVERLAPPED = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B", re.ASCII)
_COMMUNICATION = re.compile(r"\d*(SEND|RECV|UNSHARD|RESHARD|REDUCE_GRAD)\w*", re.ASCII)


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Writes the table; :func:`read_csv` gives it back. The file is replaced as a whole."""
    from gridtron.core.files import write_whole

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[str(action) for action in row] for row in schedule.actions])
    write_whole(Path(path), text.getvalue().encode())


def read_csv(path: str | Path) -> Schedule:
    """A table from a file.

    Cells are read as :meth:`Action.parse` does; empty ones are steps without work; ``(2F1;5B0)OVERLAP_F_B`` of
    torch.distributed.pipelining is its two actions, one after the other. A stage lies on the rank that computes its
    forward pass, and there are as many microbatches as the cells name.

    Args:
        path: of a file of comma-separated values, without a header.

    Returns:
        The schedule; ``validate()`` proves it.

    Raises:
        ValueError: no such file, or a cell that is no action, by row and column (both from 1).
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"the schedule {path} cannot be read: {reason}; give a table of cells as 2F0") from None
    try:
        cells = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ValueError(f"the schedule {path} is no table of comma-separated values: {error}") from None
    # Empty lines at the end of a file are no ranks; one in between would be a rank without work, which is refused.
    while cells and not any(cell.strip() for cell in cells[-1]):
        cells.pop()
    rows: list[list[Action]] = []
    holder: dict[int, tuple[int, str]] = {}
    for rank, line in enumerate(cells):
        rows.append([])
        for column, cell in enumerate(line):
            for action in _actions(cell.strip(), f"row {rank + 1}, column {column + 1} of {path}"):
                rows[-1].append(action)
                if action.kind == "F":
                    other, where = holder.setdefault(action.stage, (rank, f"row {rank + 1}, column {column + 1}"))
                    if other != rank:
                        raise ValueError(
                            f"{action} in row {rank + 1}, column {column + 1} of {path}: stage {action.stage} lies on "
                            f"the rank of {where}; a stage has one rank, so move the cell there"
                        )
    return _schedule(path, rows, {stage: rank for stage, (rank, _) in holder.items()})


def _schedule(path: str | Path, rows: list[list[Action]], holder: dict[int, int]) -> Schedule:
    actions = [action for row in rows for action in row]
    if not actions:
        raise ValueError(f"the schedule {path} is empty; it has one row a rank, with cells as 2F0")
    stages = max(action.stage for action in actions) + 1
    microbatches = max(action.microbatch for action in actions) + 1
    for stage in range(stages):
        if stage not in holder:
            raise ValueError(
                f"the schedule {path} names stages to {stages - 1} and has no forward of stage {stage}; add {stage}F0"
            )
    # Before anything is made as large as a number in the file says.
    if stages * microbatches > len(actions):
        named = {(action.stage, action.microbatch) for action in actions if action.kind == "F"}
        stage, number = next(
            divmod(code, microbatches)
            for code in range(stages * microbatches)
            if divmod(code, microbatches) not in named
        )
        raise ValueError(
            f"the schedule {path} names microbatches to {microbatches - 1}, but has no cell {stage}F{number}; they are "
            "counted from 0 without gaps"
        )
    for rank, row in enumerate(rows):
        if not row:
            raise ValueError(f"row {rank + 1} of {path} has no action; every rank holds a stage, so leave the row out")
    placement = tuple(holder[stage] for stage in range(stages))
    return Schedule(str(path), microbatches, placement, tuple(map(tuple, rows)))


def _actions(cell: str, where: str) -> list[Action]:
    if not cell:
        return []
    if _COMMUNICATION.fullmatch(cell):
        raise ValueError(
            f"{cell!r} in {where} is communication, which is derived here from the computations; keep the cells of F, "
            "B, I and W alone"
        )
    pair = _OVERLAPPED.fullmatch(cell)
    try:
        return [Action.parse(part) for part in (pair.groups() if pair else (cell,))]
    except ValueError:
        shown = cell if len(cell) <= 40 else f"{cell[:40]}..."
        raise ValueError(
            f"{shown!r} in {where} is no action; one reads as 2F0: stage, F, B, I or W, microbatch"
        ) from None
