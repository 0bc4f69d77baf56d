"""All forward passes, then all backward passes."""

from __future__ import annotations

from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.families.family import Family, Rows


def gpipe(ranks: int, microbatches: int, chunks: int) -> Rows:
    """Each rank holds every microbatch at the turning point."""
    return [[Action(kind, rank, number) for kind in "FB" for number in range(microbatches)] for rank in range(ranks)]


def peak_bound(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """All of them."""
    return microbatches


FAMILY = Family("gpipe", gpipe, peak_bound, "Huang et al. 2019, arXiv:1811.06965, section 2.3")
