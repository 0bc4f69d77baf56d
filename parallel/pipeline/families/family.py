"""What a family of schedules states about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gridtron.parallel.pipeline.action import Action

Rows = Sequence[Sequence[Action]]
"""Per rank, what it computes, in order."""


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages go round the ranks, ``chunks`` times: 0 1 2 3 0 1 2 3 (Narayanan et al. 2021, section 2.2)."""
    return tuple(range(ranks)) * chunks


def v_shape(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """There and back: 0 1 2 3 3 2 1 0. The first rank holds the first and the last stage (Qi et al. 2023)."""
    assert chunks == 2
    return (*range(ranks), *reversed(range(ranks)))


@dataclass(frozen=True)
class Family:
    """A pure function to rows of actions, and what is true of them.

    Args:
        name: as users write it.
        rows: (ranks, microbatches, chunks) -> Rows, for any numbers from 1.
        peak_bound: (rank, ranks, microbatches, chunks) -> the most microbatches of one stage that the rank holds at
            once, from the start of F to the end of B or W.
        paper: where the order and the bound are from.
        placement: (ranks, chunks) -> the rank of each stage.
        chunks: stages per rank where none are asked for.
        any_chunks: other numbers may be asked for.
    """

    name: str
    rows: Callable[[int, int, int], Rows]
    peak_bound: Callable[[int, int, int, int], int]
    paper: str
    placement: Callable[[int, int], tuple[int, ...]] = loop
    chunks: int = 1
    any_chunks: bool = False
