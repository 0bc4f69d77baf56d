"""1F1B with the backward pass in two halves: the weights' half waits, and fills what was idle (Qi et al. 2023)."""

from __future__ import annotations

from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.families.family import Family, Rows


def zb_h1(ranks: int, microbatches: int, chunks: int) -> Rows:
    """As far ahead as 1F1B; W lags behind I by the number of the rank, so that no rank holds more than rank 0."""
    return [_row(rank, microbatches, ahead=ranks - rank - 1, lag=rank) for rank in range(ranks)]


def zb_h2(ranks: int, microbatches: int, chunks: int) -> Rows:
    """Twice as far ahead, and twice the lag: nothing is idle once the first microbatch has come through.

    Below 2 * ranks - 1 microbatches there are not enough to run ahead with, and a longer lag than they fill would only
    put W off to the end.
    """
    spare = max(0, microbatches - ranks)
    return [
        _row(rank, microbatches, ahead=2 * (ranks - rank - 1), lag=rank + min(rank, spare)) for rank in range(ranks)
    ]


def _row(stage: int, microbatches: int, ahead: int, lag: int) -> list[Action]:
    """F ahead of I by ``ahead`` microbatches, W behind I by ``lag``."""
    order = [
        (kind, number)
        for step in range(microbatches + ahead + lag)
        for kind, number in (("F", step), ("I", step - ahead), ("W", step - ahead - lag))
    ]
    return [Action(kind, stage, number) for kind, number in order if 0 <= number < microbatches]


def h1_peak(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Section 2.4: (p - i + 1) whole ones and (i - 1) of which W is left, for stage i from 1: p in all."""
    return min(microbatches, ranks)


def h2_peak(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Section 2.4: (2p - 2i + 1) whole ones and (2i - 2) of which W is left, for stage i from 1: 2p - 1 in all."""
    return min(microbatches, 2 * ranks - 1)


H1 = Family("zb_h1", zb_h1, h1_peak, "Qi et al. 2023, arXiv:2401.10241, section 2.2")
H2 = Family("zb_h2", zb_h2, h2_peak, "Qi et al. 2023, arXiv:2401.10241, section 2.3")
