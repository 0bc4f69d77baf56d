"""Zero bubble in the memory of 1F1B: every rank holds one stage on the way down and one on the way up."""

from __future__ import annotations

from gridtron.parallel.pipeline.families.family import Family, Rows, v_shape
from gridtron.parallel.pipeline.families.v_pattern import v_row


def zb_v(ranks: int, microbatches: int, chunks: int) -> Rows:
    """No bubble where F, I and W cost the same and there are at least 2 * ranks - 1 microbatches.

    The first backward pass reaches rank r when it holds 2 * ranks activations less one for each that has gone up; from
    then on each forward pass is paid for by a W.
    """
    rows = []
    for rank in range(ranks):
        behind = ranks - rank
        pattern = ["F0"] * (2 * behind - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W"] * behind
        pattern += ["F0", "I0", "W", "F1", "I1", "W"] * (microbatches - ranks)
        pattern += ["I0", "I1"] * rank + ["I0", "W"] * behind + ["W"] * 2 * microbatches
        rows.append(v_row(pattern, rank, ranks, microbatches))
    return rows


def peak_bound(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """2p stages of half the size: p of 1F1B's."""
    return min(2 * microbatches, 2 * ranks)


FAMILY = Family("zb_v", zb_v, peak_bound, "Qi et al. 2023, arXiv:2401.10241, section 6 and appendix", v_shape, chunks=2)
