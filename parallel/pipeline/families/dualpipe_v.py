"""DualPipe's pairs of one forward and one backward pass, on a V: one copy of the weights instead of two."""

from __future__ import annotations

from gridtron.parallel.pipeline.families.family import Family, Rows, v_shape
from gridtron.parallel.pipeline.families.v_pattern import v_row


def dualpipe_v(ranks: int, microbatches: int, chunks: int) -> Rows:
    """In the middle a backward pass of the other stage follows each forward pass; it is split only at both ends, where
    ranks would be idle.

    From 2 * ranks microbatches on, ranks - 1 units are idle where F, I and W cost one each; with other costs never more
    than DualPipe's formula says, (ranks - 1)(2B + F - 3W).
    """
    rows = []
    for rank in range(ranks):
        behind = ranks - rank - 1
        pattern = ["F0"] * 2 * behind + ["F0", "F1"] * (rank + 1) + ["I1", "W", "F1"] * behind
        pattern += ["F0", "B1", "F1", "B0"] * (microbatches - ranks - behind)
        pattern += ["B1", "F1", "B0"] * behind
        end = ["B1", "B0"] * (rank + 1)
        pattern += [*end[: rank + 1], *(word.replace("B", "I") for word in end[rank + 1 :])]
        pattern += ["W", "I0"] * behind + ["W"] * 2 * microbatches
        rows.append(v_row(pattern, rank, ranks, microbatches))
    return rows


def peak_bound(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """One stage of half the size more than 2p."""
    return min(2 * microbatches, 2 * ranks + 1)


FAMILY = Family(
    "dualpipe_v",
    dualpipe_v,
    peak_bound,
    "DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1; cut in half: github.com/deepseek-ai/DualPipe",
    v_shape,
    chunks=2,
)
