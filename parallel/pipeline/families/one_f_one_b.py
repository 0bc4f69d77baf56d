"""One forward, one backward: as GPipe, but a rank holds no more microbatches than there are ranks from it on."""

from __future__ import annotations

from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.families.family import Family, Rows


def one_f_one_b(ranks: int, microbatches: int, chunks: int) -> Rows:
    """Rank r runs ahead by the ranks behind it, then takes a backward pass after each forward pass."""
    rows = []
    for rank in range(ranks):
        ahead = ranks - rank - 1
        order = [(step, kind) for step in range(microbatches + ahead) for kind in "FB"]
        numbered = [(kind, step if kind == "F" else step - ahead) for step, kind in order]
        rows.append([Action(kind, rank, number) for kind, number in numbered if 0 <= number < microbatches])
    return rows


def peak_bound(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """The ranks from this one on."""
    return min(microbatches, ranks - rank)


FAMILY = Family("1f1b", one_f_one_b, peak_bound, "Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1")
