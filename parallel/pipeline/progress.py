"""Follows lists of steps on several ranks, each step waiting for events that other steps give.

One engine for three uses: the prover asks whether all is reached, the lowering in which order, the simulator when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Steps:
    """What each rank does in order, as numbers.

    Args:
        needs: per rank and step, the events that it waits for.
        gives: per rank and step, the event that its end is; -1 for none.
        events: how many there are, counted from 0.
    """

    needs: Sequence[Sequence[tuple[int, ...]]]
    gives: Sequence[Sequence[int]]
    events: int


@dataclass(frozen=True)
class Progress:
    """How far the ranks came.

    Args:
        ends: per rank and step reached, when it ended.
        starts: likewise.
        stuck: of each rank that did not reach its end: (step, event that never came).
    """

    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    stuck: dict[int, tuple[int, int]]


def follow(steps: Steps, durations: Sequence[Sequence[float]], latency: float = 0.0) -> Progress:
    """Runs every rank as far as it comes; each step as early as its rank and its events allow.

    Args:
        durations: per rank and step.
        latency: between the end of a step and its event's arrival on another rank.
    """
    ranks = len(steps.gives)
    done: list[float | None] = [None] * steps.events
    owner = [0] * steps.events
    waiters: dict[int, list[int]] = {}
    starts: list[list[float]] = [[] for _ in range(ranks)]
    ends: list[list[float]] = [[] for _ in range(ranks)]
    now = [0.0] * ranks
    stuck: dict[int, tuple[int, int]] = {}
    awake = list(range(ranks - 1, -1, -1))
    while awake:
        rank = awake.pop()
        time, begun, ended = now[rank], starts[rank], ends[rank]
        needs, gives, spent = steps.needs[rank], steps.gives[rank], durations[rank]
        stuck.pop(rank, None)
        for step in range(len(ended), len(gives)):
            for event in needs[step]:
                arrived = done[event]
                if arrived is None:
                    waiters.setdefault(event, []).append(rank)
                    stuck[rank] = (step, event)
                    break
                if owner[event] != rank:
                    arrived += latency
                if arrived > time:
                    time = arrived
            if rank in stuck:
                break
            begun.append(time)
            time += spent[step]
            ended.append(time)
            event = gives[step]
            if event >= 0:
                done[event], owner[event] = time, rank
                awake.extend(waiters.pop(event, ()))
        # A rank that was stuck takes the time of its last step's end again: what it waited for counts once more.
        now[rank] = ended[-1] if ended else 0.0
    return Progress(starts, ends, stuck)


def find_cycle(steps: Steps, progress: Progress) -> list[tuple[int, int, int]]:
    """Ranks that wait for one another: (rank, step where it waits, event that the next one would give later).

    Empty where nobody waits, or where an event that is waited for is given nowhere.
    """
    if not progress.stuck:
        return []
    giver = {event: rank for rank, gives in enumerate(steps.gives) for event in gives if event >= 0}
    rank = min(progress.stuck)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        event = progress.stuck[rank][1]
        if event not in giver:
            return []
        rank = giver[event]
    return [(rank, *progress.stuck[rank]) for rank in path[path.index(rank) :]]


def steps_of(schedule: Schedule) -> Steps:
    """A table's steps. Event 2n: the forward pass of n = stage * microbatches + microbatch; 2n + 1: its input's
    gradient, by B or I."""
    count, last = schedule.microbatches, schedule.num_stages - 1

    def needs(action: Action) -> tuple[int, ...]:
        own = 2 * (action.stage * count + action.microbatch)
        if action.kind == "F":
            return (own - 2 * count,) if action.stage else ()
        if action.kind == "W":
            return (own + 1,)
        return (own, own + 2 * count + 1) if action.stage < last else (own,)

    def gives(action: Action) -> int:
        own = 2 * (action.stage * count + action.microbatch)
        return own if action.kind == "F" else -1 if action.kind == "W" else own + 1

    return Steps(
        [[needs(action) for action in row] for row in schedule.actions],
        [[gives(action) for action in row] for row in schedule.actions],
        2 * count * schedule.num_stages,
    )
