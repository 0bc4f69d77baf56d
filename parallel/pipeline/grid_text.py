"""The grid of ranks by steps as text, for refusals."""

from __future__ import annotations

from collections.abc import Collection, Sequence

Cell = tuple[int, int]
"""(rank, step)."""


def refusal(what: str, rows: Sequence[Sequence[object]], bad: Collection[Cell]) -> ValueError:
    """A message over the grid of ranks by steps, cut to a window around the ``bad`` cells, which are marked."""
    return ValueError(f"{what}\n{show_grid(rows, bad)}")


def show_grid(rows: Sequence[Sequence[object]], bad: Collection[Cell], height: int = 6, width: int = 100) -> str:
    """Ranks by steps in at most ``height`` + 1 lines of about ``width`` characters; bad cells in square brackets."""
    ranks = sorted({rank for rank, _ in bad})[:height]
    for rank in sorted(range(len(rows)), key=lambda rank: min((abs(rank - r) for r in ranks), default=rank)):
        if len(ranks) < min(height, len(rows)) and rank not in ranks:
            ranks.append(rank)
    ranks.sort()
    shown = [cell for cell in bad if cell[0] in ranks]
    longest = max(map(len, rows), default=0)

    def text(rank: int, step: int) -> str:
        cell = str(rows[rank][step]) if step < len(rows[rank]) else ""
        return f"[{cell or ' '}]" if (rank, step) in shown else cell

    cells = {
        (rank, step)
        for rank in ranks
        for _, around in shown or [(0, 0)]
        for step in range(max(around - 30, 0), around + 30)
    }
    size = max([len(text(*cell)) for cell in cells] + [4]) + 1
    columns = max(width // size, 2)
    first = min((step for _, step in shown), default=0)
    # The first bad cell stands in the middle third.
    start = max(min(first - columns // 3, max(longest, first + 1) - columns), 0)
    stop = min(start + columns, max([longest, *(step + 1 for _, step in shown)]))
    dots = " ..." if stop < longest else ""
    lines = ["  step " + "".join(f"{step:<{size}}" for step in range(start, stop)).rstrip() + dots]
    lines += [
        f"rank {rank:<2}" + "".join(f"{text(rank, s):<{size}}" for s in range(start, stop)).rstrip() for rank in ranks
    ]
    if len(ranks) < len(rows):
        lines[0] += f"   ({len(ranks)} of {len(rows)} ranks)"
    return "\n".join(lines)
