"""Programs: every transfer and no other, one order on each pair, few buffers, and an end under any timing."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridtron.parallel.pipeline import Action, Schedule, build_schedule, lower, simulate
from gridtron.parallel.pipeline.build import FAMILIES
from gridtron.parallel.pipeline.program import Transfer


def ends_with_blocking_sends(program, seed):
    """Ranks step in a random order; a send waits until its receive is posted, a wait until the send is done."""
    draw = random.Random(seed)
    at = [0] * len(program.instructions)
    posted, sent = set(), set()
    while True:
        able = []
        for rank, row in enumerate(program.instructions):
            if at[rank] < len(row):
                item = row[at[rank]]
                blocked = item.operation == "send" and item.subject not in posted
                blocked |= item.operation == "wait" and item.subject not in sent
                if not blocked:
                    able.append(rank)
        if not able:
            return all(place == len(row) for place, row in zip(at, program.instructions, strict=True))
        rank = draw.choice(able)
        item = program.instructions[rank][at[rank]]
        {"send": sent.add, "receive": posted.add}.get(item.operation, lambda subject: None)(item.subject)
        at[rank] += 1


def late_posts(program):
    """The same program with each receive posted only where it is waited for."""
    rows = []
    for row in program.instructions:
        posts = {item.subject: item for item in row if item.operation == "receive"}
        late = []
        for item in row:
            if item.operation == "wait":
                late.append(posts[item.subject])
            if item.operation != "receive":
                late.append(item)
        rows.append(tuple(late))
    return replace(program, instructions=tuple(rows))


@pytest.mark.case(24)
@pytest.mark.parametrize("name", FAMILIES)
def test_ends_under_any_timing(name):
    for ranks, microbatches in ((2, 2), (2, 3), (2, 4), (4, 4), (4, 5), (4, 8), (3, 1)):
        program = lower(build_schedule(name, ranks, microbatches))
        for seed in range(5):
            assert ends_with_blocking_sends(program, seed)


@pytest.mark.case(24)
def test_1f1b_in_the_order_of_its_table_does_not_end():
    """What the order of transfers is for: two ranks, four microbatches."""
    program = late_posts(lower(build_schedule("1f1b", 2, 4)))
    assert not ends_with_blocking_sends(program, 0)
    with pytest.raises(ValueError, match="ranks 0 and 1 post their transfers in different orders"):
        program.validate()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_transfer_in_its_place(name):
    for ranks, microbatches in ((1, 3), (2, 1), (3, 4), (4, 6)):
        schedule = build_schedule(name, ranks, microbatches)
        program = lower(schedule)
        place = schedule.placement
        needed = {
            Transfer(kind, stage, number, place[stage], place[to])
            for stage in range(schedule.num_stages)
            for kind, to in (("activation", stage + 1), ("gradient", stage - 1))
            if 0 <= to < schedule.num_stages and place[stage] != place[to]
            for number in range(microbatches)
        }
        found = {"send": [], "receive": [], "wait": []}
        for rank, row in enumerate(program.instructions):
            assert tuple(item.subject for item in row if item.operation == "compute") == schedule.actions[rank]
            for step, item in enumerate(row):
                transfer = item.subject
                if item.operation == "compute":
                    continue
                found[item.operation].append(transfer)
                assert rank == (transfer.source if item.operation == "send" else transfer.target)
                if item.operation == "send":
                    kinds = "F" if transfer.kind == "activation" else "BI"
                    action = row[step - 1].subject
                    assert (action.stage, action.microbatch) == (transfer.stage, transfer.microbatch)
                    assert action.kind in kinds
                if item.operation == "wait":
                    action = row[step + 1].subject
                    assert (action.stage, action.microbatch) == (transfer.target_stage, transfer.microbatch)
        for transfers in found.values():
            assert len(transfers) == len(needed) and set(transfers) == needed


@pytest.mark.parametrize("name", FAMILIES)
def test_buffers_do_not_grow_with_microbatches(name):
    """Receives that are posted and not yet waited for are memory."""

    def most(microbatches):
        open_now = peak = 0
        for row in lower(build_schedule(name, 4, microbatches)).instructions:
            for item in row:
                open_now += {"receive": 1, "wait": -1}.get(item.operation, 0)
                peak = max(peak, open_now)
        return peak

    assert most(64) == most(16) <= 10


def test_receives_stand_before_the_action_that_is_in_progress():
    """The second rank of 1F1B posts for what arrives while it computes, before it begins to."""
    row = [str(item) for item in lower(build_schedule("1f1b", 2, 3), ahead=0).instructions[1]]
    assert row.index("receive activation 0F1") < row.index("1F0") < row.index("wait activation 0F1") < row.index("1F1")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_table_that_can_be_followed(data):
    """Any placement, any order that keeps the dependencies: lowered, proven, and it ends."""
    ranks, extra, count = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))
    placement = data.draw(
        st.permutations([*range(ranks), *data.draw(st.lists(st.integers(0, ranks - 1), max_size=extra))])
    )
    last = len(placement) - 1
    split = data.draw(st.lists(st.booleans(), min_size=len(placement), max_size=len(placement)))
    needs = {}
    for stage in range(last + 1):
        for number in range(count):
            backward = "I" if split[stage] else "B"
            needs["F", stage, number] = [("F", stage - 1, number)] if stage else []
            after = [("I" if split[stage + 1] else "B", stage + 1, number)] if stage < last else []
            needs[backward, stage, number] = [("F", stage, number), *after]
            if split[stage]:
                needs["W", stage, number] = [("I", stage, number)]
    rows, done = [[] for _ in range(ranks)], set()
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    while len(done) < len(needs):
        ready = [key for key in needs if key not in done and all(need in done for need in needs[key])]
        key = draw.choice(ready)
        done.add(key)
        rows[placement[key[1]]].append(Action(*key))
    program = lower(
        Schedule("random", count, tuple(placement), tuple(map(tuple, rows))).validate(), data.draw(st.integers(0, 5))
    ).validate()
    assert ends_with_blocking_sends(program, data.draw(st.integers(0, 100)))


def test_lowering_is_a_function():
    schedule = build_schedule("zb_v", 4, 9)
    assert lower(schedule) == lower(build_schedule("zb_v", 4, 9))


def test_a_table_that_cannot_be_followed_is_refused():
    schedule = build_schedule("1f1b", 2, 2)
    first, *rest = schedule.actions
    with pytest.raises(ValueError, match="stands before"):
        lower(replace(schedule, actions=(first[::-1], *rest)))
    for use in (lower, simulate):
        with pytest.raises(ValueError, match="0B1 is missing"):
            use(replace(schedule, actions=(first[:-1], *rest)))


@pytest.mark.slow
def test_sixty_four_ranks():
    schedule = build_schedule("interleaved_1f1b", 64, 256, 4).validate()
    program = lower(schedule).validate()
    assert sum(map(len, program.instructions)) == 2 * 256 * 256 + 3 * 2 * 255 * 256
