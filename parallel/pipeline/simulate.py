"""When each action of a schedule would run, from costs alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.progress import follow, steps_of
from gridtron.parallel.pipeline.prove import prove_schedule
from gridtron.parallel.pipeline.schedule import Schedule

Cost = float | Sequence[float]
"""One number, or one per stage."""


@dataclass(frozen=True, slots=True)
class Event:
    """One action on its rank, in the unit of the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What :func:`simulate` gives.

    Args:
        schedule: what was simulated.
        events: per rank, in order.
        peak_activations: per rank, the most microbatches of one stage that are held at once, from the start of F to
            the end of B or W (forward passes alone: to the end of F).
        peak_bytes: per rank, likewise in bytes; None where none were given.
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[float, ...] | None = None

    @property
    def makespan(self) -> float:
        """From 0 to the last end."""
        return max(row[-1].end for row in self.events)

    @property
    def bubble_fraction(self) -> float:
        """1 - busy / span: busy is the mean over ranks of the time spent computing; span the longest, over ranks, of
        last end minus own first start (the zero-bubble paper's "cost": Qi et al. 2023, section 5.3)."""
        busy = sum(event.end - event.start for row in self.events for event in row) / len(self.events)
        span = max(row[-1].end - row[0].start for row in self.events)
        return 1 - busy / span if span > 0 else 0.0

    def to_chrome_trace(self, path: str | Path) -> None:
        """Writes a file for a trace viewer; one unit of cost is shown as a millisecond."""
        from gridtron.parallel.pipeline.chrome_trace import write_chrome_trace

        write_chrome_trace(enumerate(self.events), path, microseconds=1000.0)

    def plot(self, path: str | Path) -> None:
        """Draws ranks by time into ``path``; its ending says the format."""
        from gridtron.parallel.pipeline.draw import plot

        plot(self, path)


def simulate(
    schedule: Schedule,
    forward: Cost = 1.0,
    backward: Cost | None = None,
    input_grad: Cost = 1.0,
    weight_grad: Cost = 1.0,
    send: float = 0.0,
    activation_bytes: tuple[Cost, Cost] | None = None,
) -> Timeline:
    """Runs a schedule with costs instead of computations: each action as soon as its rank and its inputs are there.

    Args:
        forward, input_grad, weight_grad: of F, I and W, in any one unit of time; a number, or one per stage.
        backward: of B; default: input_grad + weight_grad, and nothing else is right.
        send: latency of what goes to another rank; it keeps no rank from computing.
        activation_bytes: of one microbatch on one stage: (held from the start of F to the end of I or B, kept from the
            end of I to the end of W).

    Raises:
        ValueError: a schedule that cannot be followed, a cost below 0, costs for another number of stages, a backward
            that is not the sum of its halves.

    Example:
        >>> simulate(build_schedule("1f1b", ranks=4, microbatches=8), backward=2.0).bubble_fraction
        0.2727272727272727
    """
    prove_schedule(schedule)
    stages = schedule.num_stages
    halves = [_per_stage(cost, stages, key) for key, cost in (("input_grad", input_grad), ("weight_grad", weight_grad))]
    whole = [i + w for i, w in zip(*halves, strict=True)]
    if backward is not None:
        given = _per_stage(backward, stages, "backward")
        for stage, (one, both) in enumerate(zip(given, whole, strict=True)):
            if not math.isclose(one, both, rel_tol=1e-9):
                raise ValueError(
                    f"backward={one} and input_grad + weight_grad={both} on stage {stage}: a backward pass is its two "
                    f"halves; leave backward out, or give halves with the sum {one}"
                )
    _per_stage(send, 1, "send")
    costs = {"F": _per_stage(forward, stages, "forward"), "I": halves[0], "W": halves[1], "B": whole}
    durations = [[costs[action.kind][action.stage] for action in row] for row in schedule.actions]
    progress = follow(steps_of(schedule), durations, send)
    events = [
        tuple(map(Event, [rank] * len(row), row, progress.starts[rank], progress.ends[rank]))
        for rank, row in enumerate(schedule.actions)
    ]
    peak_bytes = None
    if activation_bytes is not None:
        held, kept = (_per_stage(cost, stages, "activation_bytes") for cost in activation_bytes)
        peak_bytes = tuple(peak_held(row, held, kept, schedule.forward_only) for row in schedule.actions)
    ones = [1.0] * stages
    peak = tuple(int(peak_held(row, ones, ones, schedule.forward_only)) for row in schedule.actions)
    return Timeline(schedule, tuple(events), peak, peak_bytes)


def _per_stage(cost: Cost, stages: int, key: str) -> list[float]:
    values = [float(cost)] * stages if isinstance(cost, (int, float)) else [float(value) for value in cost]
    if len(values) != stages:
        raise ValueError(f"{key} has {len(values)} numbers for {stages} stages; give one number, or {stages}")
    for value in values:
        if not 0 <= value < math.inf:
            raise ValueError(f"{key}={value}: costs are finite and at least 0; nearest: {key}=0")
    return values


def peak_held(row: Sequence[Action], held: Sequence[float], kept: Sequence[float], forward_only: bool) -> float:
    """The most that a rank holds; a rank's actions do not overlap, so their order alone decides."""
    now = most = 0.0
    for action in row:
        stage = action.stage
        if action.kind == "F":
            now += held[stage]
            most = max(most, now)
        if action.kind == "B" or (action.kind == "F" and forward_only):
            now -= held[stage]
        elif action.kind == "I":
            now += kept[stage] - held[stage]
            most = max(most, now)
        elif action.kind == "W":
            now -= kept[stage]
    return most
