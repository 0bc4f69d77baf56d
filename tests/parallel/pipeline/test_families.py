"""Every family over its range: proven, within its peak bound, never faster than possible; and the papers' figures."""

import ast
import csv
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridtron.parallel.pipeline import Action, build_schedule, forward_only, lower, simulate
from gridtron.parallel.pipeline.build import FAMILIES
from gridtron.parallel.pipeline.families.family import Family

ROOT = Path(__file__).parents[3]
PUBLISHED = Path(__file__).parents[2] / "published"
FORMULAE = json.loads((PUBLISHED / "zb_formulae.json").read_text())
COSTS = [(1, 1, 1), (5, 6, 3), (4, 4, 3), (10, 11, 9)]  # TW <= TF <= TB, as the closed forms ask


def span(timeline):
    """The paper's cost: the longest time that a rank takes."""
    return max(row[-1].end - row[0].start for row in timeline.events)


def chunks_of(name):
    return (1, 2, 3, 4) if FAMILIES[name].any_chunks else (FAMILIES[name].chunks,)


def lower_bound(schedule, forward, input_grad, weight_grad, send):
    """No order is faster: the work of a rank after its first input came; one microbatch there and back."""
    crossings = sum(a != b for a, b in pairwise(schedule.placement))
    bounds = [sum(forward) + sum(input_grad) + 2 * send * crossings + weight_grad[0]]
    for rank in range(schedule.ranks):
        stages = schedule.stages(rank)
        work = schedule.microbatches * sum(forward[s] + input_grad[s] + weight_grad[s] for s in stages)
        arrives = sum(a != b for a, b in pairwise(schedule.placement[: stages[0] + 1]))
        bounds.append(work + sum(forward[: stages[0]]) + send * arrives)
    return max(bounds)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_numbers_and_costs(name, data):
    ranks, microbatches = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 24))
    chunks = data.draw(st.sampled_from(chunks_of(name)))
    schedule = build_schedule(name, ranks, microbatches, chunks).validate()
    lower(schedule, ahead=data.draw(st.integers(0, 4))).validate()
    cost = st.lists(st.floats(0.01, 100), min_size=schedule.num_stages, max_size=schedule.num_stages)
    forward, input_grad, weight_grad = data.draw(cost), data.draw(cost), data.draw(cost)
    send = data.draw(st.floats(0, 10))
    timeline = simulate(schedule, forward, None, input_grad, weight_grad, send)
    assert timeline.makespan >= lower_bound(schedule, forward, input_grad, weight_grad, send) * (1 - 1e-12)
    assert -1e-12 < timeline.bubble_fraction < 1
    for rank, peak in enumerate(timeline.peak_activations):
        assert peak <= FAMILIES[name].peak_bound(rank, ranks, microbatches, chunks)


@pytest.mark.case(8)
@pytest.mark.parametrize("name", FAMILIES)
def test_fewer_microbatches_than_ranks(name):
    for ranks in range(1, 9):
        for microbatches in range(1, 2 * ranks + 2):
            for chunks in chunks_of(name):
                schedule = build_schedule(name, ranks, microbatches, chunks)
                assert sum(map(len, schedule.actions)) >= 2 * microbatches * schedule.num_stages
                lower(schedule.validate()).validate()


@pytest.mark.case(24)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_crossed_transfers(name):
    """Each rank posts what it exchanges with another rank in the other's order, whatever the number of microbatches."""
    for ranks in (2, 4):
        for microbatches in (ranks, ranks + 1, 2 * ranks):
            program = lower(build_schedule(name, ranks, microbatches)).validate()
            posts = {}
            for rank, row in enumerate(program.instructions):
                for item in row:
                    if item.operation in ("send", "receive"):
                        pair = frozenset((item.subject.source, item.subject.target))
                        posts.setdefault((rank, pair), []).append(item.subject)
            assert posts
            for (_, pair), order in posts.items():
                assert all(posts[rank, pair] == order for rank in pair)


@pytest.mark.parametrize("name", FAMILIES)
def test_peak_bounds_are_reached(name):
    """A bound that no schedule reaches on any rank would say nothing."""
    for ranks in (1, 2, 4, 6):
        chunks = FAMILIES[name].chunks
        peaks = simulate(build_schedule(name, ranks, 4 * ranks)).peak_activations
        assert max(peaks) == max(FAMILIES[name].peak_bound(rank, ranks, 4 * ranks, chunks) for rank in range(ranks))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_closed_forms_of_zero_bubble(ranks):
    p = ranks
    assert FORMULAE["table2"]["ZB-H1"]["bubble"] == "(p-1)(TF+TB-TW)"
    assert FORMULAE["table2"]["ZB-H2"]["bubble"] == "(p-1)(TF+TB-2TW)"
    bubbles = {"1f1b": (1, lambda F, I, W: F + I + W), "zb_h1": (p, lambda F, I, W: F + I - W)}  # noqa: E741
    bubbles["zb_h2"] = (2 * p - 1, lambda F, I, W: F + I - 2 * W)  # noqa: E741
    for name, (fewest, bubble) in bubbles.items():
        for m in (fewest, fewest + 1, 3 * p):
            for costs in COSTS:
                time = span(simulate(build_schedule(name, p, m), costs[0], None, *costs[1:]))
                assert time == pytest.approx(m * sum(costs) + (p - 1) * bubble(*costs), rel=1e-12)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_closed_forms_of_few_microbatches(ranks):
    assert FORMULAE["small_m"].startswith("m<=p, TW<TB: 1F1B (m+p-1)(TF+TB+TW); ZB (m+p-1)(TF+TB)+TW")
    for m in range(1, ranks + 1):
        for F, I, W in COSTS:  # noqa: E741
            times = {
                n: simulate(build_schedule(n, ranks, m), F, None, I, W).makespan for n in ("1f1b", "zb_h1", "zb_h2")
            }
            steps = m + ranks - 1
            assert times == {"1f1b": steps * (F + I + W), "zb_h1": steps * (F + I) + W, "zb_h2": steps * (F + I) + W}


@pytest.mark.parametrize("ranks", range(1, 7))
def test_interleaving_divides_the_bubble(ranks):
    """A part of the ideal time, where p divides m (Narayanan et al. 2021, section 2.2.2)."""
    formulae = json.loads((PUBLISHED / "narayanan2021_formulae.json").read_text())
    assert formulae["bubble_interleaved"] == "(1/v)*(p-1)/m"
    for chunks in (1, 2, 3, 5):
        for rounds in (1, 2, 4):
            m = rounds * ranks
            schedule = build_schedule("interleaved_1f1b", ranks, m, chunks)
            ideal = m * 3.0
            makespan = simulate(schedule, 1 / chunks, None, 1 / chunks, 1 / chunks).makespan
            assert (makespan - ideal) / ideal == pytest.approx((ranks - 1) / (chunks * m), abs=1e-12)


def test_interleaved_is_1f1b_at_one_chunk():
    for ranks in range(1, 7):
        for m in range(1, 14):
            one = build_schedule("1f1b", ranks, m)
            assert build_schedule("interleaved_1f1b", ranks, m, 1).actions == one.actions


def profiled():
    return list(csv.DictReader((PUBLISHED / "zb_table5_9_bubble_and_times.csv").open()))


@pytest.mark.parametrize("row", profiled(), ids=lambda row: f"{row['model']}-{row['n_microbatches']}")
def test_published_bubbles(row):
    p, m = int(row["stages"]), int(row["n_microbatches"])
    F, B, W, send = (float(row[key]) for key in ("T_F", "T_B", "T_W", "T_comm"))
    for name, column in (("1f1b", "1F1B"), ("zb_h1", "ZB-H1"), ("zb_h2", "ZB-H2")):
        timeline = simulate(build_schedule(name, p, m), F, None, B, W, send)
        assert round(timeline.bubble_fraction, 4) == float(row[f"bubble_{column}"])
        assert timeline.bubble_fraction == pytest.approx((span(timeline) - m * (F + B + W)) / span(timeline))
    timeline = simulate(build_schedule("interleaved_1f1b", p, m, 3), F / 3, None, B / 3, W / 3, send)
    assert abs(timeline.bubble_fraction - float(row["bubble_1F1B-I"])) < 0.004


@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 5, 8, 13))
def test_zb_v_has_no_bubble_in_the_memory_of_1f1b(ranks):
    assert FORMULAE["limits"].endswith("ZB-V peak p*MB, zero bubble when TF=TB=TW")
    for m in (2 * ranks - 1, 2 * ranks, 5 * ranks):
        # A stage is half as long, and holds half as much.
        timeline = simulate(build_schedule("zb_v", ranks, m), 0.5, None, 0.5, 0.5, activation_bytes=(0.5, 0.5))
        assert span(timeline) == 3.0 * m
        assert max(timeline.peak_bytes) <= ranks


def test_zb_v_against_the_paper_at_long_runs():
    """Table 8 does not print its times; with equal ones ZB-V must be under 1F1B by far more than the table's factor."""
    rows = list(csv.DictReader((PUBLISHED / "zb_table8_bubble_zbv.csv").open()))
    assert rows
    for row in rows:
        p, m = int(row["stages"]), int(row["n_microbatches"])
        bubbles = {n: simulate(build_schedule(n, p, m), send=0.03).bubble_fraction for n in ("1f1b", "zb_h2", "zb_v")}
        assert bubbles["zb_v"] / bubbles["1f1b"] < float(row["bubble_ZB-V"]) / float(row["bubble_1F1B"])


@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 8))
def test_dualpipe_v_is_within_its_formula(ranks):
    """(PP/2 - 1)(F&B + B - 3W) on PP/2 ranks, where F&B, one pass behind the other here, is at most F + B."""
    assert FORMULAE["dualpipe_readme"]["DualPipe"] == "(PP/2-1)(F&B+B-3W), 2x, PP+1, PP devices"
    for m in (2 * ranks, 2 * ranks + 1, 4 * ranks):
        for F, I, W in COSTS:  # noqa: E741
            timeline = simulate(build_schedule("dualpipe_v", ranks, m), F, None, I, W)
            bubble = span(timeline) - 2 * m * (F + I + W)
            assert -1e-9 < bubble <= (ranks - 1) * (F + 2 * (I + W) - 3 * W)
            assert max(timeline.peak_activations) <= 2 * ranks + 1
        equal = simulate(build_schedule("dualpipe_v", ranks, m))
        assert span(equal) == 6 * m + ranks - 1


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_only_over_every_placement(name):
    for ranks in (1, 2, 3, 5):
        for microbatches in (1, 2, 5, 9):
            schedule = forward_only(build_schedule(name, ranks, 3), microbatches)
            lower(schedule.validate()).validate()
            timeline = simulate(schedule)
            # As soon as a rank has begun it is never idle but for a V's turn, which is no longer than the V.
            assert timeline.makespan <= microbatches * schedule.num_stages / ranks + schedule.num_stages
            assert set(timeline.peak_activations) == {1}
    with pytest.raises(ValueError, match=r"microbatches=0 .* nearest: 1"):
        forward_only((0, 1), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 0, 4), "ranks=0 .* nearest: ranks=1"),
        (("1f1b", 2, -3), "microbatches=-3 .* nearest: microbatches=1"),
        (("interleaved_1f1b", 2, 4, 0), "chunks=0 .* nearest: chunks=1"),
        (("1f1b", 2, 4, 2), "chunks=2 with the schedule 1f1b, which has 1 .* nearest: chunks=1"),
        (("zb_v", 2, 4, 3), "chunks=3 with the schedule zb_v, which has 2 .* nearest: chunks=2"),
        (("interleaved", 2, 4), "one of gpipe, 1f1b, .* nearest: interleaved_1f1b"),
        (("none.csv", 2, 4), "none.csv cannot be read"),
    ],
)
def test_refused_with_the_nearest_choice(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(*arguments)


def test_a_family_of_ones_own_needs_no_registration():
    def backward_in_reverse(ranks, microbatches, chunks):
        numbers = range(microbatches)
        return [
            [Action("F", rank, n) for n in numbers] + [Action("B", rank, n) for n in reversed(numbers)]
            for rank in range(ranks)
        ]

    family = Family("reversed", backward_in_reverse, lambda rank, ranks, m, chunks: m, "none")
    schedule = build_schedule(family, 3, 4)
    lower(schedule.validate()).validate()
    assert simulate(schedule).makespan == simulate(build_schedule("gpipe", 3, 4)).makespan


def test_no_schedule_sends_a_tensor():
    """Families import actions and tables alone, and their code names nothing that communicates."""
    files = sorted((ROOT / "parallel/pipeline/families").glob("*.py"))
    assert len(files) >= len({family.rows.__module__ for family in FAMILIES.values()})
    for path in files:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [getattr(node, key, "") for key in ("id", "attr", "name", "module", "arg")]
            words = " ".join(str(name).lower() for name in names)
            assert not any(word in words for word in ("send", "recv", "receive", "transfer", "torch")), (
                f"{path}: {words}"
            )


def test_schedules_do_without_torch():
    code = (
        "import sys; from gridtron.parallel.pipeline import build_schedule, lower, simulate, write_csv; "
        "simulate(lower(build_schedule('zb_v', 2, 3).validate()).validate().schedule); "
        "print(sorted({'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


def test_a_family_is_as_short_as_contributing_says():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lines = (ROOT / "parallel/pipeline/families/one_f_one_b.py").read_text().count("\n")
    assert f"`families/one_f_one_b.py`, {lines} lines" in text
