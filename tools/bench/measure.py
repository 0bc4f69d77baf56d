"""Timing in alternation: what is compared runs step by step in turn, so that a machine's drift meets both alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """Something that can run a step.

    Args:
        name: as the table shows it.
        step: step(i) -> loss; the same tokens for the same i, whoever runs it.
        share: the loss on every rank from what step gave on each; outside the timed part.
        trains: it has a loss, which must be the others'.
    """

    name: str
    step: Callable[[int], float]
    share: Callable[[float], float] = float
    trains: bool = True


@dataclass(frozen=True)
class Ratio:
    """Median of per-pair ratios ours / peer, and its 95% interval."""

    ours: str
    peer: str
    median: float
    low: float
    high: float
    pairs: int

    def holds(self, bound: float) -> bool:
        """A bound holds if the interval reaches it."""
        return self.low <= bound


def alternate(
    contenders: Sequence[Contender],
    pairs: int,
    warmup: int,
    barrier: Callable[[], None],
    progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and losses of every counted step of every contender, name -> one a round.

    Each round runs one step of each, in an order that turns by one place a round: no contender always follows another.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    losses: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for round_number in range(warmup + pairs):
        turn = round_number % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            barrier()
            start = time.perf_counter()
            loss = contender.step(round_number)
            barrier()
            elapsed = time.perf_counter() - start
            losses[contender.name].append(contender.share(loss))
            if round_number >= warmup:
                seconds[contender.name].append(elapsed)
        progress()
    return seconds, losses


def compare(seconds: Mapping[str, Sequence[float]], ours: str, peer: str) -> Ratio:
    """Ratios of the rounds' times, ours over the peer's."""
    ratios = [a / b for a, b in zip(seconds[ours], seconds[peer], strict=True)]
    low, high = median_interval(ratios)
    return Ratio(ours, peer, statistics.median(ratios), low, high, len(ratios))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the median by order statistics: no assumption on the distribution but independence.

    The k-th smallest and k-th largest hold the median with probability 1 - 2 P(Binomial(n, 1/2) < k).
    """
    ordered = sorted(values)
    count = len(ordered)
    outside, rank = 0.0, 0
    while rank < (count - 1) // 2:
        outside += math.comb(count, rank) / 2**count
        if 2 * outside > 1 - confidence:
            break
        rank += 1
    index = max(rank - 1, 0)
    return ordered[index], ordered[count - 1 - index]
