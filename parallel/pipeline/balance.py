"""How many consecutive layers each stage gets, from their costs alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

Range = tuple[int, int]
"""Half-open: (start, stop)."""


def balance(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[Range]:
    """Splits layers into consecutive stages so that the dearest stage is as cheap as it can be.

    Exact, for floats too: the least bound that a greedy split keeps is found by bisection over integers (parametric
    search; Han, Narahari and Choi 1992 for chains). Among the splits within that bound it is the one whose counts of
    layers are the most even (least sum of squares), and among those the one whose earlier stages have fewer: they keep
    the most microbatches in flight, and with them the most memory.

    Args:
        costs: of each layer, none negative, in any unit.
        stages: how many; each gets at least one layer.
        first, last: what the first and the last stage cost beside their layers (embedding; head and loss).

    Returns:
        (start, stop) of each stage's layers, in order.

    Raises:
        ValueError: more stages than layers, no stage at all, or a cost that is negative or not finite.

    Example:
        >>> balance([1.0] * 8, 4, last=2.0)
        [(0, 2), (2, 4), (4, 7), (7, 8)]
    """
    _check(costs, stages, first, last)
    weights = _integers([*costs, first, last])
    *layers, of_first, of_last = weights
    # Layer 0 always lies on the first stage and the last layer on the last: what those cost more is theirs.
    layers[0] += of_first
    layers[-1] += of_last
    before = [0, *accumulate(layers)]
    low, high = max(layers), before[-1]
    while low < high:
        middle = (low + high) // 2
        if _greedy_stages(layers, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return list(pairwise(_most_even(before, stages, low)))


def _check(costs: Sequence[float], stages: int, first: float, last: float) -> None:
    if stages < 1 or stages > len(costs):
        raise ValueError(
            f"stages={stages} for {len(costs)} layers: each stage holds at least one layer; "
            f"nearest: stages={min(max(stages, 1), len(costs))}"
        )
    wrong = [cost for cost in (*costs, first, last) if not 0 <= cost < math.inf]
    if wrong:
        raise ValueError(f"a cost of {wrong[0]}: costs are finite and at least 0")


def _integers(costs: Sequence[float]) -> list[int]:
    """The same proportions without rounding, so that equal splits compare as equal."""
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _greedy_stages(layers: Sequence[int], bound: int) -> int:
    """The fewest stages within ``bound``, which every single layer keeps. More stages are possible as well: to cut a
    stage in two makes neither part dearer."""
    count, filled = 1, 0
    for cost in layers:
        if filled + cost > bound:
            count, filled = count + 1, 0
        filled += cost
    return count


def _most_even(before: Sequence[int], stages: int, bound: int) -> list[int]:
    """Edges of the split within ``bound`` with the least sum of squared counts; earlier stages short among equals."""
    length = len(before) - 1
    # least[edge]: the sum over the stages so far when the next begins at ``edge``, counted from the last stage back,
    # so that the choice at equal sums is made for the earliest stage.
    least: list[int | None] = [None] * length + [0]
    choices: list[list[int]] = []
    for _ in range(stages):
        found: list[int | None] = [None] * (length + 1)
        choice = [0] * (length + 1)
        for start in range(length):
            for stop in range(start + 1, length + 1):
                if before[stop] - before[start] > bound:
                    break
                rest = least[stop]
                if rest is None:
                    continue
                total = rest + (stop - start) ** 2
                best = found[start]
                if best is None or total < best:
                    found[start], choice[start] = total, stop
        least = found
        choices.append(choice)
    edges = [0]
    for choice in reversed(choices):
        edges.append(choice[edges[-1]])
    return edges
