"""Timelines to look at: ranks by time, as a picture and as coloured text.

A rank is a row, an action a cell with the number of its microbatch, its kind a colour, its chunk a shade of it; idle
time stays blank. Both forms come from the same timeline and the same colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gridtron.parallel.pipeline.picture import Box, Colour, Label, Picture, is_dark, mix, text_width

if TYPE_CHECKING:
    from rich.text import Text

    from gridtron.parallel.pipeline.schedule import Schedule
    from gridtron.parallel.pipeline.simulate import Event, Timeline

_KINDS: dict[str, tuple[str, Colour]] = {
    "F": ("forward", (88, 144, 209)),
    "B": ("backward", (240, 170, 72)),
    "I": ("gradient of the input", (222, 104, 74)),
    "W": ("gradient of the weights", (96, 178, 116)),
}
"""Kind of action -> its words, its colour."""

_INK, _QUIET, _LINE, _IDLE = (34, 34, 40), (110, 112, 122), (222, 224, 230), (246, 247, 249)
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)

_MARGIN, _HEAD, _FOOT = 24.0, 84.0, 44.0
_NARROWEST, _WIDEST = 1100.0, 5200.0
"""Pixels: bounds of the width of the time axis."""
_MOST_HINTS = 20_000
"""Actions up to which an SVG tells each by a hint under the pointer: beyond, the file would be slow to open."""
_CELL = 13.0
"""Pixels that the shortest action gets where the bounds allow: two digits can be read in them."""


def plot(timeline: Timeline, path: str | Path) -> None:
    """Writes the picture of a timeline, as .svg or .png by the ending of ``path``.

    Raises:
        ValueError: another ending.
        OSError: a place that cannot be written.
    """
    draw(timeline).save(path)


def title(schedule: Schedule) -> str:
    """One line: what is drawn, as in "interleaved_1f1b: 4 ranks, 8 microbatches, 2 stages a rank"."""
    parts = [_count(schedule.ranks, "rank"), _count(schedule.microbatches, "microbatch", "microbatches")]
    chunks = _chunks(schedule)
    if chunks > 1:
        parts.append(f"{chunks} stages a rank")
    return f"{schedule.name}: {', '.join(parts)}"


def summary(timeline: Timeline) -> str:
    """One line: the numbers of a timeline."""
    peaks = timeline.peak_activations
    most = f"{peaks[0]} on each rank" if len(set(peaks)) == 1 else f"{min(peaks)} to {max(peaks)} by rank"
    return (
        f"makespan {timeline.makespan:.6g}   bubble {100 * timeline.bubble_fraction:.1f} %   "
        f"peak activations {most} (in microbatches of one stage)"
    )


# ---------------------------------------------------------------- the picture
def draw(timeline: Timeline) -> Picture:
    """The picture, before it is written."""
    schedule = timeline.schedule
    ranks = schedule.ranks
    row = 34.0 if ranks <= 8 else 26.0 if ranks <= 24 else 18.0
    # Actions without a cost have no cell.
    shortest = min((e.end - e.start for e in _events(timeline) if e.end > e.start), default=1.0)
    time = max(timeline.makespan, shortest)
    length = min(max(_CELL * time / shortest, _NARROWEST), _WIDEST)
    names = [_row_name(schedule, rank) for rank in range(ranks)]
    left = _MARGIN + max(text_width(name, 13) for name in names) + 14
    picture = Picture(left + length + 86 + _MARGIN, _HEAD + ranks * row + _FOOT)
    chunk_of, digits = _chunk_of_stage(schedule), len(str(schedule.microbatches - 1))
    _draw_head(picture, timeline, left + length)
    _draw_axis(picture, timeline, time, left, length, row)
    for rank, name in enumerate(names):
        top = _HEAD + rank * row
        picture.labels.append(Label(left - 12, top + row / 2, name, 13, _INK, "end"))
        peak = f"{timeline.peak_activations[rank]}"
        picture.labels.append(Label(left + length + 43, top + row / 2, peak, 13, _INK))
        for event in timeline.events[rank]:
            fill = _shade(event.action.kind, chunk_of[event.action.stage], max(chunk_of) + 1)
            _draw_cell(picture, event, fill, left, length / time, top, row, digits)
    if sum(map(len, timeline.events)) > _MOST_HINTS:
        picture.boxes = [replace(box, hint="") for box in picture.boxes]
    return picture


def _draw_cell(
    picture: Picture, event: Event, fill: Colour, left: float, scale: float, top: float, row: float, digits: int
) -> None:
    action, width = event.action, (event.end - event.start) * scale
    gap = 1.0 if width >= 6 else 0.0
    x = left + event.start * scale
    hint = f"{action}: {_KINDS[action.kind][0]} of microbatch {action.microbatch} on stage {action.stage}, "
    hint += f"{event.start:.6g} to {event.end:.6g}"
    picture.boxes.append(Box(x, top + 1.5, max(width - gap, 0), row - 3, fill, hint))
    text = str(action.microbatch)
    # By the longest number, so that those of one kind are alike.
    size = min(0.41 * row, (width - gap - 2) / text_width("0" * digits, 1))
    if size >= 6.5:
        # Whole sizes: a font is made for each.
        ink = _WHITE if is_dark(fill) else _INK
        picture.labels.append(Label(x + (width - gap) / 2, top + row / 2, text, math.floor(2 * size) / 2, ink))


def _draw_head(picture: Picture, timeline: Timeline, right: float) -> None:
    schedule = timeline.schedule
    picture.labels.append(Label(_MARGIN, 26, title(schedule), 18, _INK, "start", bold=True))
    picture.labels.append(Label(_MARGIN, 50, summary(timeline), 13, _QUIET, "start"))
    picture.labels.append(Label(right + 43, _HEAD - 12, "peak", 12, _QUIET))
    x = _MARGIN + text_width(summary(timeline), 13) + 40
    width = sum(_legend_widths(schedule))
    # On a line of its own where a long summary leaves no room beside it.
    x, y = (max(right - width, x), 50.0) if x + width <= right else (max(right - width, _MARGIN + 420), 26.0)
    for kind, step in zip(_kinds(schedule), _legend_widths(schedule), strict=True):
        chunks = _chunks(schedule)
        for chunk in range(chunks):
            picture.boxes.append(Box(x + 14 * chunk, y - 7, 14, 14, _shade(kind, chunk, chunks)))
        picture.labels.append(Label(x + 14 * chunks + 7, y, _legend_words(kind, chunks), 13, _INK, "start"))
        x += step


def _legend_words(kind: str, chunks: int) -> str:
    words = _KINDS[kind][0]
    return words if chunks == 1 or kind != "F" else f"{words}, by chunk"


def _legend_widths(schedule: Schedule) -> list[float]:
    chunks = _chunks(schedule)
    return [14 * chunks + 7 + text_width(_legend_words(kind, chunks), 13) + 18 for kind in _kinds(schedule)]


def _draw_axis(picture: Picture, timeline: Timeline, time: float, left: float, length: float, row: float) -> None:
    ranks = timeline.schedule.ranks
    bottom = _HEAD + ranks * row
    for rank in range(ranks):
        picture.boxes.append(Box(left, _HEAD + rank * row + 1.5, length, row - 3, _IDLE))
    step = _tick(time, length / 70)
    for number in range(math.floor(time / step + 1e-9) + 1):
        x = left + number * step * length / time
        picture.boxes.append(Box(x - 0.5, _HEAD - 4, 1, bottom - _HEAD + 8, _LINE))
        picture.labels.append(Label(x, bottom + 16, f"{number * step:.6g}", 11, _QUIET))
    picture.labels.append(Label(left + length / 2, bottom + 33, "time", 12, _QUIET))


def _tick(time: float, most: float) -> float:
    """A step of 1, 2 or 5 times a power of ten, so that at most ``most`` of them fit into ``time``."""
    rough = time / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


# ---------------------------------------------------------------- the terminal
def terminal(timeline: Timeline, width: int = 100, colour: bool = True) -> Text:
    """The timeline as lines of text, a rank each, for ``rich`` to print.

    Args:
        timeline: of any length; where a column is longer than the actions in it, it shows the kind with the most time.
        width: columns there are.
        colour: cells are coloured; else their ends are told by "-" and chunks after the first by small letters.
    """
    from rich.text import Text

    schedule = timeline.schedule
    names = [_row_name(schedule, rank) for rank in range(schedule.ranks)]
    margin = max(map(len, names)) + 1
    peak = max(len(str(value)) for value in timeline.peak_activations)
    columns = max(width - margin - len("  peak ") - peak, 20)
    shortest = min((e.end - e.start for e in _events(timeline) if e.end > e.start), default=1.0)
    time = max(timeline.makespan, shortest)
    # Whole columns for the shortest action where there are enough: equal actions then look equal.
    most = len(f"F{schedule.microbatches - 1}") + 1
    each = min(math.floor(columns * shortest / time), most)
    scale = each / shortest if each >= 1 else columns / time
    lines = []
    for rank, name in enumerate(names):
        line = Text(f"{name:<{margin}}")
        line.append_text(_terminal_row(timeline, rank, scale, math.ceil(time * scale - 1e-6), colour))
        line.append(f"  peak {timeline.peak_activations[rank]:>{peak}}")
        lines.append(line)
    legend = Text(" " * margin)
    for kind in _kinds(schedule):
        style = _style(_KINDS[kind][1]) if colour else ""
        legend.append(f" {kind} ", style).append(f" {_KINDS[kind][0]}   ")
    if _chunks(schedule) > 1:
        legend.append("darker: later chunks" if colour else "small letters: later chunks")
    return Text("\n").join([*lines, legend])


def _terminal_row(timeline: Timeline, rank: int, scale: float, columns: int, colour: bool) -> Text:
    from rich.text import Text

    schedule, line = timeline.schedule, Text()
    owners, chunk_of = _owners(timeline, rank, scale, columns), _chunk_of_stage(schedule)
    dense = any((event.end - event.start) * scale < 1 - 1e-6 for event in timeline.events[rank])
    place = 0
    while place < columns:
        event = owners[place]
        stop = place + 1
        while stop < columns and owners[stop] is event:
            stop += 1
        if event is None:
            line.append((" " if colour else "·") * (stop - place))
        else:
            chunk = chunk_of[event.action.stage]
            kind = event.action.kind.lower() if chunk and not colour else event.action.kind
            number = "" if dense else str(event.action.microbatch)
            style = _style(_shade(event.action.kind, chunk, max(chunk_of) + 1)) if colour else ""
            line.append(_fit(kind, number, stop - place, colour), style)
        place = stop
    return line


def _owners(timeline: Timeline, rank: int, scale: float, columns: int) -> list[Event | None]:
    """Per column the action that stands for it: one of the kind and chunk with the most time there; None: idle."""
    spent: list[dict[tuple[str, int], float]] = [{} for _ in range(columns)]
    first: list[dict[tuple[str, int], Event]] = [{} for _ in range(columns)]
    for event in timeline.events[rank]:
        start, end = event.start * scale, event.end * scale
        key = (event.action.kind, event.action.stage)
        for column in range(math.floor(start + 1e-6), min(math.ceil(end - 1e-6), columns)):
            share = min(end, column + 1) - max(start, column)
            spent[column][key] = spent[column].get(key, 0.0) + share
            first[column].setdefault(key, event)
    return [
        first[column][max(times, key=lambda key: times[key])] if times and sum(times.values()) >= 0.5 else None
        for column, times in enumerate(spent)
    ]


def _fit(kind: str, number: str, width: int, colour: bool) -> str:
    """What of "F12" fits; colour tells the kind already."""
    choices = (number, "") if colour else (f"{kind}{number}", kind)
    text = next(choice for choice in choices if len(choice) <= width)
    return text.ljust(width, " " if colour else "-")


def _style(fill: Colour) -> str:
    red, green, blue = fill
    return f"{'white' if is_dark(fill) else 'black'} on rgb({red},{green},{blue})"


# ---------------------------------------------------------------- shared
def _events(timeline: Timeline) -> Iterator[Event]:
    for row in timeline.events:
        yield from row


def _chunk_of_stage(schedule: Schedule) -> list[int]:
    """The place of each stage among those of its rank."""
    chunks = [0] * schedule.num_stages
    for rank in range(schedule.ranks):
        for chunk, stage in enumerate(schedule.stages(rank)):
            chunks[stage] = chunk
    return chunks


def _chunks(schedule: Schedule) -> int:
    return max(_chunk_of_stage(schedule)) + 1


def _kinds(schedule: Schedule) -> list[str]:
    used = {action.kind for row in schedule.actions for action in row}
    return [kind for kind in _KINDS if kind in used]


def _shade(kind: str, chunk: int, chunks: int) -> Colour:
    """Light for the first chunk, dark for the last; the colour itself where there is one."""
    base = _KINDS[kind][1]
    if chunks == 1:
        return base
    place = chunk / (chunks - 1)
    return mix(base, _WHITE, 0.45 - 0.9 * place) if place <= 0.5 else mix(base, _BLACK, 0.4 * (place - 0.5))


def _row_name(schedule: Schedule, rank: int) -> str:
    stages = schedule.stages(rank)
    if schedule.placement == tuple(range(schedule.ranks)):
        return f"rank {rank}"
    shown = ", ".join(map(str, stages)) if len(stages) <= 4 else f"{stages[0]}, {stages[1]}, ... {stages[-1]}"
    return f"rank {rank} ({'stage' if len(stages) == 1 else 'stages'} {shown})"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
