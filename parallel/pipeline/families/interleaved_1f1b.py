"""1F1B over several stages a rank: each stage is shorter, and so is the bubble."""

from __future__ import annotations

from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.families.family import Family, Rows


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int) -> Rows:
    """Microbatches go in groups of one per rank, each group through all stages of a rank in turn.

    Where the last group is not full, what it lacks is left out: no microbatch waits for another one, so a table
    without one of them can still be followed.
    """
    full = -(-microbatches // ranks) * ranks
    groups = [range(first, first + ranks) for first in range(0, full, ranks)]
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forward = [Action("F", stage, number) for group in groups for stage in stages for number in group]
        backward = [Action("B", stage, number) for group in groups for stage in reversed(stages) for number in group]
        ahead = _ahead(rank, ranks, chunks)
        order = forward[:ahead]
        for step, action in enumerate(backward):
            order += [*forward[ahead + step : ahead + step + 1], action]
        rows.append([action for action in order if action.microbatch < microbatches])
    return rows


def _ahead(rank: int, ranks: int, chunks: int) -> int:
    """Forward passes before the first pair: to the last stage and, at one chunk, as in 1F1B."""
    return ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks


def peak_bound(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Those that it runs ahead by, and one."""
    return min(microbatches * chunks, _ahead(rank, ranks, chunks) + 1)


FAMILY = Family(
    "interleaved_1f1b",
    interleaved_1f1b,
    peak_bound,
    "Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2",
    chunks=2,
    any_chunks=True,
)
