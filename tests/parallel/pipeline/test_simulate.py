"""The simulator against hand-counted timelines, the paper's peaks, and an independent event loop."""

import json
import random
from pathlib import Path

import pytest

from gridtron.parallel.pipeline import build_schedule, simulate
from gridtron.parallel.pipeline.build import FAMILIES

PUBLISHED = Path(__file__).parents[2] / "published"


def test_two_ranks_by_hand():
    timeline = simulate(build_schedule("1f1b", 2, 2), forward=2, input_grad=2, weight_grad=1, send=0.5)
    table = [[(str(event.action), event.start, event.end) for event in row] for row in timeline.events]
    assert table == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 8, 11), ("0B1", 13, 16)],
        [("1F0", 2.5, 4.5), ("1B0", 4.5, 7.5), ("1F1", 7.5, 9.5), ("1B1", 9.5, 12.5)],
    ]
    assert timeline.makespan == 16
    # Both compute for 10; the longest from own first start to last end is 16.
    assert timeline.bubble_fraction == pytest.approx(1 - 10 / 16)
    assert timeline.peak_activations == (2, 1)
    assert timeline.peak_bytes is None


def test_span_is_a_ranks_own():
    """The makespan counts from 0, the bubble from each rank's own start."""
    timeline = simulate(build_schedule("1f1b", 3, 1), forward=(1, 1, 5), input_grad=1, weight_grad=0)
    assert timeline.makespan == 10
    assert timeline.bubble_fraction == pytest.approx(1 - ((2 + 2 + 6) / 3) / 10)


def test_neighbours_on_one_rank_hand_over_at_once():
    late = simulate(build_schedule("zb_v", 1, 3), send=100)
    assert late.makespan == 18 and late.bubble_fraction == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_times_against_a_plain_fixpoint(name):
    """Starts found by repeating the definition until nothing moves: no events, no queues."""
    draw = random.Random(5)
    for ranks, microbatches in ((1, 3), (2, 5), (3, 4), (4, 9)):
        schedule = build_schedule(name, ranks, microbatches)
        costs = {kind: [draw.uniform(0.1, 3) for _ in range(schedule.num_stages)] for kind in "FIW"}
        send = draw.uniform(0, 1)
        timeline = simulate(schedule, costs["F"], None, costs["I"], costs["W"], send)
        costs["B"] = [i + w for i, w in zip(costs["I"], costs["W"], strict=True)]
        ends = {}

        def arrival(kinds, stage, microbatch, rank, ends=ends, schedule=schedule, send=send):
            if not 0 <= stage < schedule.num_stages:
                return 0.0
            found = max(ends.get((kind, stage, microbatch), 0.0) for kind in kinds)
            return found + (send if schedule.stage_rank(stage) != rank else 0.0)

        while True:
            new = {}
            for rank, row in enumerate(schedule.actions):
                now = 0.0
                for action in row:
                    kind, stage, number = action.kind, action.stage, action.microbatch
                    needs = {"F": [("F", stage - 1)], "W": [("I", stage)]}.get(kind, [("F", stage), ("BI", stage + 1)])
                    start = max([now, *(arrival(kinds, at, number, rank) for kinds, at in needs)])
                    now = new[kind, stage, number] = start + costs[kind][stage]
            if new == ends:
                break
            ends.clear()
            ends.update(new)
        assert {(e.action.kind, e.action.stage, e.action.microbatch): e.end for r in timeline.events for e in r} == (
            pytest.approx(ends)
        )


@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 8))
def test_bytes_of_each_stage(ranks):
    formulae = json.loads((PUBLISHED / "zb_formulae.json").read_text())["stage_i_peak"]
    assert formulae == {"ZB-H1": "(p-i+1)MB+(i-1)MW", "ZB-H2": "(2p-2i+1)MB+(2i-2)MW"}
    p, MB, MW = ranks, 34.0, 32.0
    h1 = simulate(build_schedule("zb_h1", p, 4 * p), activation_bytes=(MB, MW))
    h2 = simulate(build_schedule("zb_h2", p, 4 * p), activation_bytes=(MB, MW))
    assert h1.peak_bytes == tuple((p - i + 1) * MB + (i - 1) * MW for i in range(1, p + 1))
    assert h2.peak_bytes == tuple((2 * p - 2 * i + 1) * MB + (2 * i - 2) * MW for i in range(1, p + 1))


def test_bytes_where_the_second_half_keeps_more():
    """One microbatch: 3 from F on, 7 from the end of I on; per stage on the other rank."""
    timeline = simulate(build_schedule("zb_h1", 2, 1), activation_bytes=((3.0, 1.0), (7.0, 0.5)))
    assert timeline.peak_bytes == (7.0, 1.0)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"backward": 3.0}, r"backward=3\.0 and input_grad \+ weight_grad=2\.0 on stage 0.*sum 3\.0"),
        ({"forward": [1.0, 2.0]}, "forward has 2 numbers for 3 stages"),
        ({"weight_grad": -1}, r"weight_grad=-1\.0: .* nearest: weight_grad=0"),
        ({"send": float("nan")}, "send=nan"),
        ({"input_grad": float("inf")}, "input_grad=inf"),
        ({"activation_bytes": (1.0, [1.0])}, "activation_bytes has 1 numbers for 3 stages"),
    ],
)
def test_refused_costs(costs, message):
    with pytest.raises(ValueError, match=message):
        simulate(build_schedule("1f1b", 3, 2), **costs)


def test_backward_may_be_said_as_the_sum():
    schedule = build_schedule("1f1b", 3, 2)
    assert simulate(schedule, backward=[0.3] * 3, input_grad=0.1, weight_grad=0.2) == simulate(
        schedule, input_grad=0.1, weight_grad=0.2
    )


def test_chrome_trace(tmp_path):
    timeline = simulate(build_schedule("zb_h1", 2, 3), forward=1.5)
    timeline.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(event["tid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [
        (event.rank, str(event.action), event.start * 1000, (event.end - event.start) * 1000)
        for row in timeline.events
        for event in row
    ]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["rank 0", "rank 1"]
    assert [item.name for item in tmp_path.iterdir()] == ["trace.json"]
