"""From a table to programs: where a stage's neighbour lies on another rank, what it gives must be sent and received."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gridtron.parallel.pipeline.program import Instruction, Program, Transfer
from gridtron.parallel.pipeline.progress import follow, steps_of
from gridtron.parallel.pipeline.prove import prove_schedule
from gridtron.parallel.pipeline.schedule import Schedule

_UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def lower(schedule: Schedule, ahead: int = 1) -> Program:
    """Adds sends, receives and waits; pure.

    The table is followed with unit costs (a whole backward counts two). The times at which outputs are finished, and
    the lower rank first among equal ones, are one order of all transfers that agrees with every dependency. A send is
    started right after its action. A receive is posted where the receiving rank is at that time: before the action that
    it is then busy with, and ``ahead`` actions earlier where nothing to or from the same rank lies between. So the
    posts of each pair of ranks have one order on both, and the first transfer that has not happened can always happen.
    A buffer is held from the post, so receives are not posted any earlier. A wait stands right before the action.

    Args:
        schedule: a table that can be followed; that is proven first.
        ahead: how many actions earlier than needed a receive is posted where it can be.

    Raises:
        ValueError: what :func:`prove_schedule` refuses.
    """
    prove_schedule(schedule)
    durations = [[_UNITS[action.kind] for action in row] for row in schedule.actions]
    ends = follow(steps_of(schedule), durations).ends
    transfers = _transfers(schedule, ends)
    before, waits, after = _places(schedule, transfers, ends, ahead)
    programs = []
    for rank, row in enumerate(schedule.actions):
        program: list[Instruction] = []
        for step, action in enumerate(row):
            program += [Instruction("receive", transfer) for transfer in before[rank].get(step, ())]
            if (rank, step) in waits:
                program.append(Instruction("wait", waits[rank, step]))
            program.append(Instruction("compute", action))
            if (rank, step) in after:
                program.append(Instruction("send", after[rank, step]))
        programs.append(tuple(program))
    return Program(schedule, tuple(programs))


def _transfers(schedule: Schedule, ends: Sequence[Sequence[float]]) -> list[tuple[float, int, int, Transfer]]:
    """(when finished, source, step of the source, transfer), in the one order of all."""
    placement, last = schedule.placement, schedule.num_stages - 1
    found = []
    for rank, row in enumerate(schedule.actions):
        for step, action in enumerate(row):
            stage = action.stage
            neighbour = stage + 1 if action.kind == "F" else stage - 1
            if action.kind == "W" or not 0 <= neighbour <= last or placement[neighbour] == rank:
                continue
            kind = "activation" if action.kind == "F" else "gradient"
            transfer = Transfer(kind, stage, action.microbatch, rank, placement[neighbour])
            found.append((ends[rank][step], rank, step, transfer))
    found.sort(key=lambda item: item[:3])
    return found


def _places(
    schedule: Schedule,
    transfers: Sequence[tuple[float, int, int, Transfer]],
    ends: Sequence[Sequence[float]],
    ahead: int,
) -> tuple[list[dict[int, list[Transfer]]], dict[tuple[int, int], Transfer], dict[tuple[int, int], Transfer]]:
    """Receives to post before each step of each rank; by (rank, step) the transfer to wait for, and the one to send."""
    count = schedule.microbatches
    steps = [
        {(a.kind == "F", a.stage * count + a.microbatch): step for step, a in enumerate(row) if a.kind != "W"}
        for row in schedule.actions
    ]
    before: list[dict[int, list[Transfer]]] = [{} for _ in ends]
    waits: dict[tuple[int, int], Transfer] = {}
    after: dict[tuple[int, int], Transfer] = {}
    # By (rank, other rank): the first step before which a post for the next transfer of the pair keeps its order.
    earliest: dict[tuple[int, int], int] = {}
    for time, source, step, transfer in transfers:
        target, number = transfer.target, transfer.target_stage * count + transfer.microbatch
        forward = transfer.kind == "activation"
        after[source, step] = transfer
        waits[target, steps[target][forward, number]] = transfer
        earliest[source, target] = step + 1
        # So the receive of a gradient, too, stands behind the forward pass that it answers and has the shape of.
        lowest = earliest.get((target, source), 0)
        place = max(bisect_left(ends[target], time) - ahead, lowest)
        earliest[target, source] = place
        before[target].setdefault(place, []).append(transfer)
    return before, waits, after
