"""What is refused, with which words; and the verdict against a plain topological sort."""

import graphlib
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridtron.parallel.pipeline import Action, Schedule, build_schedule, lower
from gridtron.parallel.pipeline.grid_text import show_grid
from gridtron.parallel.pipeline.program import Instruction, Program, Transfer


def table(*rows, placement=(0, 1), microbatches=2, forward_only=False):
    actions = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
    return Schedule("mine", microbatches, placement, actions, forward_only)


SECOND = "1F0 1B0 1F1 1B1"
BROKEN = {
    "missing backward": (
        table("0F0 0F1 0B0", SECOND),
        r"the backward pass 0B1 is missing on rank 0; add B, or I and W",
        "[ ]",
    ),
    "missing forward": (table("0F0 0B0 0F1 0B1", "1F0 1B0 1B1"), "1F1 is missing on rank 1; add it", "[ ]"),
    "missing W": (table("0F0 0F1 0I0 0B1", SECOND), "0W0 is missing on rank 0, where 0I0 stands; add it", "[ ]"),
    "missing I": (table("0F0 0F1 0W0 0B1", SECOND), "0I0 is missing on rank 0, where 0W0 stands; add it", "[ ]"),
    "swapped order": (
        table("0B0 0F0 0F1 0B1", SECOND),
        "0B0 stands before 0F0, which it needs, on rank 0; swap",
        "[0B0]",
    ),
    "W before I": (
        table("0F0 0F1 0W0 0I0 0B1", SECOND),
        "0W0 stands before 0I0, which it needs, on rank 0; swap",
        "[0W0]",
    ),
    "both": (table("0F0 0F1 0B0 0I0 0W0 0B1", SECOND), "0I0 stands beside 0B0 on rank 0: B is both I and W", "[0I0]"),
    "B and W": (table("0F0 0F1 0B0 0W0 0B1", SECOND), "0W0 stands beside 0B0 on rank 0: B is both I and W", "[0W0]"),
    "a stage twice": (
        table("0F0 0F1 0F0 0B0 0B1", SECOND),
        "0F0 at rank 0, step 2 .* stands at step 0 already",
        "[0F0]",
    ),
    "wrong rank": (
        table("0F0 0F1 1F0 0B0 0B1", "1B0 1F1 1B1"),
        "1F0 at rank 0, step 2 .* stage 1 lies on rank 1",
        "[1F0]",
    ),
    "no such stage": (
        table("0F0 0F1 0B0 0B1 2F0", SECOND),
        "2F0 at rank 0, step 4 .* there are stages 0 to 1",
        "[2F0]",
    ),
    "no such microbatch": (
        table("0F0 0F1 0F2 0B0 0B1", SECOND),
        "0F2 at rank 0, step 2 .* microbatches 0 to 1",
        "[0F2]",
    ),
    "forward alone": (
        table("0F0 0F1 0B0", "1F0 1F1", forward_only=True),
        "0B0 at rank 0, step 2 .* forward passes alone; leave it out",
        "[0B0]",
    ),
    "crossed": (
        table("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
        r"a circle: 0B0 \(rank 0, step 1\) needs 1B0 \(rank 1, step 3\); 1F1 \(rank 1, step 0\) needs 0F1 \(rank 0, ",
        "[1F1]",
    ),
    "own stages out of order": (
        table("0F0 2F0 1F0 2B0 1B0 0B0", placement=(0, 0, 0), microbatches=1),
        r"2F0 \(rank 0, step 1\) needs 1F0 \(rank 0, step 2\), which stands behind it; swap the two",
        "[2F0]",
    ),
    "a rank without stages": (
        table("0F0 0B0", "", placement=(0,), microbatches=1),
        "every rank needs at least one",
        "",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tables(name):
    schedule, message, marked = BROKEN[name]
    with pytest.raises(ValueError, match=message) as caught:
        schedule.validate()
    assert marked in str(caught.value)
    assert str(caught.value).count("\n") < 11
    assert max(map(len, str(caught.value).splitlines()[1:] or [""])) <= 140


def test_the_grid_of_a_refusal():
    with pytest.raises(ValueError, match="swap them") as caught:
        table("0F0 0F1 0W0 0I0 0B1", SECOND).validate()
    assert str(caught.value).splitlines()[1:] == [
        "  step 0     1     2     3     4",
        "rank 0 0F0   0F1   [0W0] 0I0   0B1",
        "rank 1 1F0   1B0   1F1   1B1",
    ]


def test_a_big_grid_is_cut_to_a_window():
    big = build_schedule("zb_v", 16, 64)
    row = list(big.actions[7])
    row[50], row[150] = row[150], row[50]
    broken = replace(big, actions=(*big.actions[:7], tuple(row), *big.actions[8:]))
    with pytest.raises(ValueError, match="on rank 7; swap them") as caught:
        broken.validate()
    lines = str(caught.value).splitlines()
    assert len(lines) < 12 and "(6 of 16 ranks)" in lines[1]
    assert any(line.startswith("rank 7 ") and f"[{row[50]}]" in line for line in lines)
    assert show_grid([["0F0"] * 500], [(0, 499)]).splitlines()[1].rstrip().endswith("[0F0]")


def test_a_long_circle_is_cut():
    """Six ranks, each of which waits for the next; the last waits for the first."""
    ranks = 6
    rows = [f"{r + ranks}F0 {r}F0" for r in range(ranks)]
    schedule = table(*rows, placement=(*range(ranks),) * 2, microbatches=1, forward_only=True)
    with pytest.raises(ValueError, match=r"in a circle: .*; and 2 more\. Move one") as caught:
        schedule.validate()
    assert str(caught.value).count("\n") < 11


# ---------------------------------------------------------------- the verdict
@st.composite
def random_tables(draw):
    """Each rank's actions in a random order: most cannot be followed, short ones often can."""
    ranks, count = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    placement = draw(st.permutations([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=1))]))
    rows = []
    for rank in range(ranks):
        cells = []
        for stage in (stage for stage, holder in enumerate(placement) if holder == rank):
            kinds = draw(st.sampled_from(("FB", "FIW")))
            cells += [Action(kind, stage, number) for kind in kinds for number in range(count)]
        # Sorted by kind first, then a few are moved: both verdicts are common.
        for _ in range(draw(st.integers(0, 3))):
            cell = cells.pop(draw(st.integers(0, len(cells) - 1)))
            cells.insert(draw(st.integers(0, len(cells))), cell)
        rows.append(tuple(cells))
    return Schedule("random", count, tuple(placement), tuple(rows))


def can_be_followed(schedule):
    """By the definition, over a graph of all actions."""
    graph = {action: set() for row in schedule.actions for action in row}
    for row in schedule.actions:
        for before, after in pairwise(row):
            graph[after].add(before)
    for action in graph:
        needs = {"F": [("F", -1)], "B": [("F", 0), ("B", 1), ("I", 1)], "W": [("I", 0)]}
        for kind, away in needs["B" if action.kind == "I" else action.kind]:
            if action.stage + away >= 0 and (need := Action(kind, action.stage + away, action.microbatch)) in graph:
                graph[action].add(need)
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        return False
    return True


def test_the_verdict_is_that_of_a_topological_sort():
    seen = set()

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(schedule=random_tables())
    def check(schedule):
        good = can_be_followed(schedule)
        seen.add(good)
        if good:
            lower(schedule.validate()).validate()
        else:
            with pytest.raises(ValueError) as caught:
                schedule.validate()
            assert str(caught.value).count("\n") < 11

    check()
    assert seen == {True, False}


# ---------------------------------------------------------------- programs
def changed(program, rank, change):
    rows = [list(row) for row in program.instructions]
    change(rows[rank])
    return replace(program, instructions=tuple(map(tuple, rows)))


def first(row, operation, number=0):
    return [step for step, item in enumerate(row) if item.operation == operation][number]


def drop(operation):
    return lambda row: row.pop(first(row, operation))


def double(operation):
    return lambda row: row.insert(first(row, operation), row[first(row, operation)])


def early(operation):
    """To the front of the rank's program."""
    return lambda row: row.insert(0, row.pop(first(row, operation)))


def swap(operation):
    def change(row):
        one, two = first(row, operation), first(row, operation, 1)
        row[one], row[two] = row[two], row[one]

    return change


def last_gradient_first(row):
    step = max(step for step, item in enumerate(row) if item.operation == "receive" and item.subject.kind == "gradient")
    row.insert(0, row.pop(step))


FOREIGN = Transfer("activation", 0, 0, 0, 2)
BROKEN_PROGRAMS = {
    "dropped wait": (1, drop("wait"), "'1F0' runs before a wait for what it needs from stage 0; add the wait"),
    "dropped receive": (1, drop("receive"), "'wait activation 0F0' stands before its receive is posted"),
    "dropped send": (0, drop("send"), "'receive activation 0F0' waits for what rank 0 never sends; add it"),
    "dropped action": (2, drop("compute"), "the program of rank 2 computes 2B0 where 1f1b has 2F0"),
    "action left over": (2, lambda row: row.append(row[-2]), "the program of rank 2 computes 9 actions, 1f1b has 8"),
    "double send": (0, double("send"), "'send activation 0F0' stands twice"),
    "double wait": (1, double("wait"), "'wait activation 0F0' stands twice"),
    "double receive": (1, double("receive"), "'receive activation 0F0' stands twice"),
    "early send": (0, early("send"), "'send activation 0F0' stands before the action that computes it"),
    "early wait": (1, early("wait"), "'wait activation 0F0' stands before its receive is posted"),
    "early gradient": (0, last_gradient_first, "stands before the forward pass of stage 0 that it answers"),
    "swapped receives": (
        1,
        swap("receive"),
        "ranks 0 and 1 post their transfers in different orders .*'activation 0F0'",
    ),
    "a foreign transfer": (
        0,
        lambda row: row.append(Instruction("send", FOREIGN)),
        "which this placement does not need",
    ),
    "on the wrong rank": (
        2,
        lambda row: row.append(Instruction("send", Transfer("activation", 0, 0, 0, 1))),
        "goes from rank 0 to rank 1; move it to rank 0",
    ),
}


@pytest.mark.parametrize("name", BROKEN_PROGRAMS)
def test_broken_programs(name):
    rank, change, message = BROKEN_PROGRAMS[name]
    program = lower(build_schedule("1f1b", 3, 4)).validate()
    with pytest.raises(ValueError, match=message) as caught:
        changed(program, rank, change).validate()
    assert str(caught.value).count("\n") < 11


@pytest.mark.case(24)
def test_a_deadlock_names_its_circle():
    """A ring of three ranks that all send before they post: each pair has one order, and nothing moves."""
    ranks, count = 3, 8
    rows = [
        tuple(Action("F", stage, number) for stage in (rank, rank + ranks) for number in range(count))
        for rank in range(ranks)
    ]
    schedule = Schedule("ring", count, (0, 1, 2, 0, 1, 2), tuple(rows), forward_only=True).validate()
    program = lower(schedule).validate()
    late = []
    for row in program.instructions:
        posts = {item.subject: item for item in row if item.operation == "receive"}
        kept = [item for item in row if item.operation != "receive"]
        late.append(
            tuple(
                part for item in kept for part in ((posts[item.subject], item) if item.operation == "wait" else (item,))
            )
        )
    circle = (
        r"deadlock in ring: rank 0 in 'send activation 0F2' \(step 5\) waits for rank 1 in 'send activation 1F1' "
        r"\(step 7\) waits for rank 2 in 'send activation 2F0' \(step 3\) waits for rank 0\. Post a receive"
    )
    with pytest.raises(ValueError, match=circle) as caught:
        Program(schedule, tuple(late)).validate()
    text = str(caught.value)
    assert all(mark in text for mark in ("[send 0F2]", "[send 1F1]", "[send 2F0]")) and text.count("\n") < 11


def test_a_program_for_other_ranks():
    program = lower(build_schedule("1f1b", 3, 4))
    with pytest.raises(ValueError, match="a program for 2 ranks and a schedule for 3"):
        replace(program, instructions=program.instructions[:2]).validate()
