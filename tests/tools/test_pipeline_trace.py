"""What a traced step tells: the simulator's own timeline, read as a measurement, gives the simulator's numbers."""

import itertools
import json
from pathlib import Path

import pytest
from ranks import run_ranks

from gridtron.conf.compose import compose
from gridtron.conf.rules import Surroundings
from gridtron.core import Grid
from gridtron.core.training.protocols import RunInfo
from gridtron.parallel.pipeline.build import FAMILIES, build_schedule
from gridtron.parallel.pipeline.simulate import simulate
from gridtron.tools.pipeline_trace import PipelineTrace, expected_timeline, measured_timeline, report


def rows_of(timeline):
    return [[(str(e.action), 1e9 + e.start, 1e9 + e.end) for e in row] for row in timeline.events]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_simulated_step_measures_as_simulated(name):
    schedule = build_schedule(name, 3, 7)
    stages = range(schedule.num_stages)
    costs = {"forward": [1.0 + stage for stage in stages], "input_grad": 2.0, "weight_grad": [0.5 * s for s in stages]}
    plain, delayed = simulate(schedule, **costs), simulate(schedule, **costs, send=2.0)
    measured = measured_timeline(schedule, rows_of(plain))
    assert measured.makespan == pytest.approx(plain.makespan, rel=1e-6)
    assert measured.bubble_fraction == pytest.approx(plain.bubble_fraction, abs=1e-6)
    assert expected_timeline(measured).makespan == pytest.approx(plain.makespan, rel=1e-6)
    late = measured_timeline(schedule, rows_of(delayed))
    assert late.bubble_fraction == pytest.approx(delayed.bubble_fraction, abs=1e-6)
    assert expected_timeline(late).makespan == pytest.approx(plain.makespan, rel=1e-6)
    assert late.makespan > plain.makespan
    words = report(4, late, Path("x.json"))
    assert f"{100 * delayed.bubble_fraction:.1f} % measured, {100 * plain.bubble_fraction:.1f} % simulated" in words


def traced(folder, steps, done):
    """The steps of a run that were traced, from the engine's place in it; and each rank's files."""
    import torch

    from gridtron.core.data.batch import Batch
    from gridtron.tools.assemble import build_model
    from gridtron.tools.assemble import build_schedule as schedule_of

    words = ["model=tiny", "model.num_layers=3", "grid.pipeline=2", "train.global_batch_size=6", "launch.processes=2"]
    plan = compose([*words, "precision=fp32"], surroundings=Surroundings(2, data_fault=lambda config: None))
    with Grid.create(pipeline=2) as grid:
        from gridtron.parallel.engine import TrainingEngine

        schedule = schedule_of(plan, grid)
        engine = TrainingEngine(build_model(plan, grid, None, schedule), grid, plan.optimizer, schedule=schedule)
        callback = PipelineTrace(engine.microbatches.runner, grid, steps)
        callback.on_start(RunInfo(grid.rank, 2, folder, steps, {}), done)
        tokens = torch.arange(24).view(2, 12)
        batches = [Batch.of(tokens, tokens, torch.arange(2))] * 3
        for step in range(done + 1, steps + 1):
            callback.on_step_start(step)
            engine.forward_backward(batches)
            engine.step(1e-3)
            callback.on_step_end(step, {})
            engine.evaluate(batches)
            assert engine.microbatches.runner.trace is None


@pytest.mark.parametrize(("steps", "done", "step"), [(5, 0, 3), (2, 0, 2), (5, 4, 5)])
def test_one_step_of_each_start_is_traced(steps, done, step, tmp_path):
    run_ranks(traced, 2, str(tmp_path), steps, done)
    (file,) = (tmp_path / "trace").iterdir()
    assert file.name == f"step-{step:08d}.json"
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    schedule = build_schedule("1f1b", 2, 3)
    for rank, actions in enumerate(schedule.actions):
        mine = [event for event in events if event["tid"] == rank]
        assert [event["name"] for event in mine] == [str(action) for action in actions]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in itertools.pairwise(mine))
    began = {event["name"]: event["ts"] for event in events}
    assert min(began.values()) == 0 and began["0F0"] < began["1F0"] < began["0B0"]
