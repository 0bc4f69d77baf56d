"""Forward passes alone, for evaluation, over the stages of any schedule."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.schedule import Schedule


def forward_only(placement: Schedule | Sequence[int], microbatches: int, ranks: int | None = None) -> Schedule:
    """In each step every rank takes, of what is ready, the furthest stage, then the earliest microbatch.

    Args:
        placement: a schedule, or the rank of each stage.
        microbatches: how many, from 1.
        ranks: default: up to the highest of ``placement``.
    """
    if isinstance(placement, Schedule):
        ranks, placement = placement.ranks, placement.placement
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches} of a forward pass: there is at least one; nearest: 1")
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1 if ranks is None else ranks)]
    ready: list[list[tuple[int, int]]] = [[] for _ in rows]
    arrived = [(0, number) for number in range(microbatches)]
    while arrived or any(ready):
        for stage, number in arrived:
            heapq.heappush(ready[placement[stage]], (-stage, number))
        arrived = []
        for row, heap in zip(rows, ready, strict=True):
            if heap:
                negative, number = heapq.heappop(heap)
                row.append(Action("F", -negative, number))
                if -negative + 1 < len(placement):
                    arrived.append((-negative + 1, number))
    return Schedule("forward_only", microbatches, tuple(placement), tuple(map(tuple, rows)), forward_only=True)
