"""A short notation for what a rank of a V-shaped placement does."""

from __future__ import annotations

from collections.abc import Iterable

from gridtron.parallel.pipeline.action import Action


def v_row(pattern: Iterable[str], rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The actions of ``rank``, from words without numbers.

    "F0" is the next forward pass of the stage on the way down, "F1" of the one on the way up; "B0", "I0", "B1", "I1"
    their next backward pass, or its first half; "W" the second half of the oldest that waits for it. A word for which
    nothing is left, or nothing is there yet, is passed over: that is how few microbatches cut a pattern short.
    """
    stages = {"0": rank, "1": 2 * ranks - 1 - rank}
    forward, backward = {"0": 0, "1": 0}, {"0": 0, "1": 0}
    waiting: list[Action] = []
    row: list[Action] = []
    for word in pattern:
        kind, way = word[0], word[1:]
        if kind == "W":
            row += waiting[:1]
            del waiting[:1]
        elif kind == "F" and forward[way] < microbatches:
            row.append(Action("F", stages[way], forward[way]))
            forward[way] += 1
        elif kind != "F" and backward[way] < forward[way]:
            row.append(Action(kind, stages[way], backward[way]))
            if kind == "I":
                waiting.append(Action("W", stages[way], backward[way]))
            backward[way] += 1
    return row
