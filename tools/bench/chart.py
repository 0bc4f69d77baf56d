"""Ratios of a benchmark as bars: in the terminal, and as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gridtron.conf.names import nearest_choice

FORMATS = ("svg", "png", "pdf")
_WIDTH = 40


def check_chart(path: str) -> str | None:
    """Why a chart cannot be written there; None where it can."""
    file = Path(path).expanduser()
    suffix = file.suffix.lstrip(".").lower()
    if suffix not in FORMATS:
        return f"a chart is a file of {', '.join('.' + name for name in FORMATS)}; {nearest_choice(suffix, FORMATS)}"
    if not file.absolute().parent.is_dir():
        return f"there is no folder {file.absolute().parent}; make it, or give another file"
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed: pip install 'gridtron[bench]', or leave chart out"
    return None


def show_bars(sections: Sequence[Mapping[str, Any]]) -> None:
    """A bar for each peer: the step's time as a share of its; shorter is faster, the mark is equal time."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="gridtron's step as a share of the peer's (| is equal time)", title_justify="left")
    for column in ("", "peer", "", "ratio"):
        table.add_column(column, justify="right" if column == "ratio" else "left", no_wrap=True)
    for section in sections:
        title = section["title"]
        for ratio in section["ratios"]:
            table.add_row(title, ratio["peer"], bar_of(ratio["median"]), f"{ratio['median']:.3f}")
            title = ""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)


def bar_of(ratio: float) -> str:
    """``ratio`` times _WIDTH / 2 blocks, with a mark where the ratio is 1; cut at 2."""
    filled = round(min(ratio, 2.0) * _WIDTH / 2)
    cells = ["█" if place < filled else " " for place in range(_WIDTH)]
    cells[_WIDTH // 2 - 1 if filled < _WIDTH // 2 else _WIDTH // 2] = "|"
    return "".join(cells)


def draw_chart(figures: Mapping[str, Any], path: Path) -> None:
    """One row a peer and section: the ratio with its 95% interval, the bound as a tick, equal time as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [(section["title"], ratio) for section in figures["sections"] for ratio in section["ratios"]]
    figure = Figure(figsize=(9, 1 + 0.36 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(rows))
    medians = [ratio["median"] for _, ratio in rows]
    low = [ratio["median"] - ratio["low"] for _, ratio in rows]
    high = [ratio["high"] - ratio["median"] for _, ratio in rows]
    colours = ["#4878a8" if ratio["median"] <= 1 else "#b0b0b0" for _, ratio in rows]
    axes.barh(places, medians, xerr=[low, high], color=colours, capsize=2)
    bounds = [(place, ratio["bound"]) for place, (_, ratio) in enumerate(rows) if "bound" in ratio]
    axes.scatter([bound for _, bound in bounds], [place for place, _ in bounds], marker="|", s=160, color="black")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(list(places), [f"{title}: {ratio['peer']}" for title, ratio in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("gridtron's step as a share of the peer's: median and 95% interval; ticks are bounds")
    axes.set_title(f"{figures['environment']['processor']}, {figures['environment']['cores']} cores", fontsize=9)
    figure.savefig(path)
