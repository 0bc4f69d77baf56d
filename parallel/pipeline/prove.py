"""Proves that a table can be followed, and that the program it was lowered to always ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gridtron.parallel.pipeline.grid_text import Cell, refusal
from gridtron.parallel.pipeline.program import Program, Transfer
from gridtron.parallel.pipeline.progress import Steps, find_cycle, follow, steps_of
from gridtron.parallel.pipeline.schedule import Schedule


def prove_schedule(schedule: Schedule) -> None:
    """Complete, on the right ranks, in an order that can be followed.

    Every stage computes F of every microbatch once, and B once, or I and W once each (``forward_only``: F alone), on
    the rank that holds it; F comes after F of the stage before, B and I after F of their own and after B or I of the
    next stage, W after I; and the ranks never wait for one another in a circle.

    Raises:
        ValueError: what is wrong and what to change, over the grid with the bad cell marked.
    """
    places = _check_cells(schedule)
    _check_complete(schedule, places)
    steps = steps_of(schedule)
    progress = follow(steps, [[1.0] * len(row) for row in schedule.actions])
    if not progress.stuck:
        return
    cycle = find_cycle(steps, progress)
    assert cycle, "everything is given somewhere, so who is stuck is in a circle or waits for one"
    rows = schedule.actions
    bad = [(rank, step) for rank, step, _ in cycle]
    giver = {event: (rank, step) for rank, row in enumerate(steps.gives) for step, event in enumerate(row)}
    parts = []
    for rank, step, event in cycle:
        there, later = giver[event]
        parts.append(
            f"{rows[rank][step]} (rank {rank}, step {step}) needs {rows[there][later]} (rank {there}, step {later})"
        )
    if len(cycle) == 1:
        what = f"wrong order in the schedule {schedule.name}: {parts[0]}, which stands behind it; swap the two"
    else:
        around = f"; and {len(parts) - 4} more" if len(parts) > 4 else ""
        what = (
            f"the schedule {schedule.name} waits in a circle: {'; '.join(parts[:4])}{around}. "
            "Move one of the needed actions before the waiting one"
        )
    raise refusal(what, rows, bad)


def _check_cells(schedule: Schedule) -> dict[tuple[str, int], Cell]:
    """Each cell by itself. Gives where each (kind, stage * microbatches + microbatch) stands."""
    rows, count, placement = schedule.actions, schedule.microbatches, schedule.placement
    name = f"the schedule {schedule.name}"
    if set(placement) != set(range(len(rows))):
        raise ValueError(
            f"{name} places its {len(placement)} stages on ranks {sorted(set(placement))} and has rows for ranks "
            f"0 to {len(rows) - 1}; every rank needs at least one stage and a row"
        )
    allowed = ("F",) if schedule.forward_only else ("F", "B", "I", "W")
    places: dict[tuple[str, int], Cell] = {}
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            stage, number, kind = action.stage, action.microbatch, action.kind
            wrong = ""
            if stage >= len(placement):
                wrong = f"there are stages 0 to {len(placement) - 1}; name one of those"
            elif number >= count:
                wrong = f"there are microbatches 0 to {count - 1}; name one of those, or raise microbatches"
            elif placement[stage] != rank:
                wrong = f"stage {stage} lies on rank {placement[stage]}; move it to that row, or change the placement"
            elif kind not in allowed:
                wrong = "the schedule is for forward passes alone; leave it out"
            elif (kind, stage * count + number) in places:
                there = places[kind, stage * count + number]
                wrong = f"it stands at step {there[1]} already; leave one of the two out"
            if wrong:
                raise refusal(f"{action} at rank {rank}, step {step} of {name}: {wrong}", rows, [(rank, step)])
            places[kind, stage * count + number] = (rank, step)
    return places


def _check_complete(schedule: Schedule, places: dict[tuple[str, int], Cell]) -> None:
    """Every stage and microbatch has what it needs, in the order that it needs it in."""
    rows, count = schedule.actions, schedule.microbatches

    def fail(what: str, cell: Cell) -> ValueError:
        return refusal(f"{what} in the schedule {schedule.name}", rows, [cell])

    for stage, rank in enumerate(schedule.placement):
        for number in range(count):
            code = stage * count + number
            forward, whole = places.get(("F", code)), places.get(("B", code))
            halves = places.get(("I", code)), places.get(("W", code))
            end = (rank, len(rows[rank]))
            if forward is None:
                raise fail(f"{stage}F{number} is missing on rank {rank}; add it", end)
            if schedule.forward_only:
                continue
            first = whole or halves[0]
            if whole and (twice := halves[0] or halves[1]):
                raise fail(
                    f"{rows[rank][twice[1]]} stands beside {stage}B{number} on rank {rank}: B is both I and W; "
                    f"keep either B, or I and W,",
                    twice,
                )
            if not whole and not halves[0] and not halves[1]:
                raise fail(f"the backward pass {stage}B{number} is missing on rank {rank}; add B, or I and W,", end)
            if not whole and (not halves[0] or not halves[1]):
                lacks, has = ("I", "W") if not halves[0] else ("W", "I")
                raise fail(
                    f"{stage}{lacks}{number} is missing on rank {rank}, where {stage}{has}{number} stands; add it", end
                )
            assert first is not None
            if first[1] < forward[1]:
                raise fail(
                    f"{rows[rank][first[1]]} stands before {stage}F{number}, which it needs, on rank {rank}; swap them",
                    first,
                )
            if halves[1] and halves[1][1] < first[1]:
                raise fail(
                    f"{stage}W{number} stands before {stage}I{number}, which it needs, on rank {rank}; swap them",
                    halves[1],
                )


def prove_program(program: Program) -> None:
    """The program computes the schedule's table, moves what must move, and ends.

    Each output that a stage on another rank needs is sent once, after it was computed; its receive is posted once and
    waited for once, after the post and before the use; both ranks of a pair post all their transfers in one order; and
    everything ends when a send blocks its rank until the receive is posted. It then ends where sends do not block and
    the transfers of a pair are carried out one after another, too (NCCL): take the order in which the blocking run
    posts. Whatever a wait needs, and all that precedes it on its pair, stands before the wait in that order on both
    ranks, so nothing in it is ever waited for in vain.

    Raises:
        ValueError: what is wrong and what to change, over the grid with the bad cell marked; for a deadlock the cycle.
    """
    _check_computations(program)
    transfers = _Transfers(program)
    transfers.check()
    _check_pairs(program)
    steps = _program_steps(program, transfers.number, 2 * len(transfers.computed))
    progress = follow(steps, [[0.0] * len(row) for row in program.instructions])
    if not progress.stuck:
        return
    rows = program.instructions
    cycle = find_cycle(steps, progress)
    parts = [f"rank {rank} in '{rows[rank][step]}' (step {step})" for rank, step, _ in cycle]
    around = f"; and {len(parts) - 4} more" if len(parts) > 4 else ""
    raise refusal(
        f"deadlock in {program.schedule.name}: {' waits for '.join(parts[:4])}{around} waits for rank {cycle[0][0]}. "
        "Post a receive of the circle before the send that blocks",
        _texts(program),
        [(rank, step) for rank, step, _ in cycle],
    )


def _texts(program: Program) -> list[list[str]]:
    """Instructions for the grid; whether a transfer is an activation is to be seen from F or B."""
    return [
        [str(item).replace("activation ", "").replace("gradient ", "") for item in row] for row in program.instructions
    ]


def _check_computations(program: Program) -> None:
    if len(program.instructions) != program.schedule.ranks:
        raise ValueError(
            f"a program for {len(program.instructions)} ranks and a schedule for {program.schedule.ranks}; lower it"
        )
    for rank, (row, instructions) in enumerate(zip(program.schedule.actions, program.instructions, strict=True)):
        computed = [item.subject for item in instructions if item.operation == "compute"]
        for step, (action, subject) in enumerate(zip(row, computed, strict=False)):
            if action != subject:
                raise ValueError(
                    f"the program of rank {rank} computes {subject} where {program.schedule.name} has "
                    f"{action} (step {step}); lower the table again"
                )
        if len(row) != len(computed):
            raise ValueError(
                f"the program of rank {rank} computes {len(computed)} actions, {program.schedule.name} has "
                f"{len(row)}; lower the table again"
            )


class _Transfers:
    """Walks through the instructions and holds each transfer to its place. A transfer's number is 2 * (stage *
    microbatches + microbatch), one more for a gradient; that of the action which computes it is the same."""

    def __init__(self, program: Program):
        self.program, self.schedule, self.rows = program, program.schedule, program.instructions
        self.count, self.last = self.schedule.microbatches, self.schedule.num_stages - 1
        total = 2 * self.count * self.schedule.num_stages
        self.computed, self.waited = bytearray(total), bytearray(total)
        self.sent, self.posted = bytearray(total), bytearray(total)

    def number(self, transfer: Transfer) -> int:
        return 2 * (transfer.stage * self.count + transfer.microbatch) + (transfer.kind == "gradient")

    def check(self) -> None:
        """Each needed transfer has its send, receive and wait, in their places; there is no other."""
        check = {"compute": self._compute, "send": self._send, "receive": self._receive, "wait": self._wait}
        for rank, row in enumerate(self.rows):
            for step, item in enumerate(row):
                wrong = check[item.operation](item.subject, rank)
                if wrong:
                    raise self._fail(f"'{item}' {wrong}", rank, step)
        # What is used was waited for, and what is waited for was posted: seen above.
        for rank, row in enumerate(self.rows):
            for step, item in enumerate(row):
                if isinstance(item.subject, Transfer) and not self.sent[self.number(item.subject)]:
                    raise self._fail(
                        f"'{item}' waits for what rank {item.subject.source} never sends; add it", rank, step
                    )

    def _fail(self, what: str, rank: int, step: int) -> ValueError:
        where = f"rank {rank}, instruction {step} of the program of {self.schedule.name}"
        return refusal(f"{where}: {what}", _texts(self.program), [(rank, step)])

    def _compute(self, action: Any, rank: int) -> str:
        if action.kind == "W":
            return ""
        stage, backward = action.stage, action.kind != "F"
        own = 2 * (stage * self.count + action.microbatch) + backward
        self.computed[own] = 1
        neighbour = stage + 1 if backward else stage - 1
        if not 0 <= neighbour <= self.last or self.schedule.placement[neighbour] == rank:
            return ""
        if self.waited[own + 2 * self.count * (neighbour - stage)]:
            return ""
        return f"runs before a wait for what it needs from stage {neighbour}; add the wait before it"

    def _misplaced(self, transfer: Any, rank: int, here: int) -> str:
        """No such transfer in this placement, or not on this rank."""
        ends = (transfer.source, transfer.target)
        stages = (transfer.stage, transfer.target_stage)
        inside = all(0 <= stage <= self.last for stage in stages) and transfer.microbatch < self.count
        if not inside or ends != tuple(map(self.schedule.stage_rank, stages)) or ends[0] == ends[1]:
            return f"goes from rank {ends[0]} to rank {ends[1]}, which this placement does not need; leave it out"
        if rank != here:
            return f"goes from rank {ends[0]} to rank {ends[1]}; move it to rank {here}"
        return ""

    def _send(self, transfer: Any, rank: int) -> str:
        wrong = self._misplaced(transfer, rank, transfer.source)
        return wrong or self._once(transfer, self.sent, self.computed, "the action that computes it")

    def _receive(self, transfer: Any, rank: int) -> str:
        wrong = self._misplaced(transfer, rank, transfer.target)
        if wrong or transfer.kind == "activation":
            return wrong or self._once(transfer, self.posted, None, "")
        forward = 2 * (transfer.target_stage * self.count + transfer.microbatch)
        if not self.computed[forward]:
            # The shape of the gradient is that of the forward pass's output.
            return f"stands before the forward pass of stage {transfer.target_stage} that it answers; move it behind"
        return self._once(transfer, self.posted, None, "")

    def _wait(self, transfer: Any, rank: int) -> str:
        wrong = self._misplaced(transfer, rank, transfer.target)
        return wrong or self._once(transfer, self.waited, self.posted, "its receive is posted")

    def _once(self, transfer: Transfer, done: bytearray, earlier: bytearray | None, what: str) -> str:
        number = self.number(transfer)
        if done[number]:
            return "stands twice; leave one out"
        if earlier is not None and not earlier[number]:
            return f"stands before {what}; move it behind"
        done[number] = 1
        return ""


def _check_pairs(program: Program) -> None:
    """Both ranks of each pair post the same transfers in the same order."""
    posts: dict[tuple[int, int], list[Cell]] = {}
    for rank, row in enumerate(program.instructions):
        for step, item in enumerate(row):
            subject = item.subject
            if isinstance(subject, Transfer) and item.operation != "wait":
                other = subject.target if item.operation == "send" else subject.source
                posts.setdefault((rank, other), []).append((rank, step))
    rows = program.instructions
    for (rank, other), cells in posts.items():
        for here, there in zip(cells, posts[other, rank], strict=True):
            mine, yours = rows[here[0]][here[1]].subject, rows[there[0]][there[1]].subject
            if mine != yours:
                raise refusal(
                    f"ranks {rank} and {other} post their transfers in different orders in the program of "
                    f"{program.schedule.name}: where rank {rank} has '{mine}', rank {other} has '{yours}'; "
                    "give both ranks one order",
                    _texts(program),
                    [here, there],
                )


def _program_steps(program: Program, number: Callable[[Transfer], int], events: int) -> Steps:
    """Event 2n: the receive of transfer n is posted; 2n + 1: it has been sent. A send waits for the post."""
    needs: list[list[tuple[int, ...]]] = []
    gives: list[list[int]] = []
    for row in program.instructions:
        needs.append([])
        gives.append([])
        for item in row:
            need: tuple[int, ...] = ()
            give = -1
            if isinstance(item.subject, Transfer):
                event = 2 * number(item.subject)
                if item.operation == "send":
                    need, give = (event,), event + 1
                elif item.operation == "receive":
                    give = event
                else:
                    need = (event + 1,)
            needs[-1].append(need)
            gives[-1].append(give)
    return Steps(needs, gives, events)
