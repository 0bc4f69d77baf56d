"""``gridtron schedule``: what it prints, what it writes, what it refuses."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from gridtron.models.cost.split import stage_costs
from gridtron.parallel.pipeline.build import FAMILIES, build_schedule
from gridtron.parallel.pipeline.csv_table import write_csv
from gridtron.parallel.pipeline.simulate import simulate
from gridtron.tools.cli import main


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def schedule(*words):
    return main(["schedule", *words])


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_printed_and_written(name, tmp_path, capsys):
    assert schedule(f"name={name}", "ranks=4", "microbatches=8", "out=numbers.json") == 0
    printed = capsys.readouterr().out
    timeline = simulate(build_schedule(name, 4, 8))
    assert f"makespan {timeline.makespan:.6g} " in printed and f"{100 * timeline.bubble_fraction:.1f} %" in printed
    assert [line for line in printed.splitlines() if line.startswith("rank ")] and "gridtron" not in printed
    stem = f"{name}-4x8" + ("x2" if timeline.schedule.num_stages == 8 else "")
    written = sorted(path.name for path in (tmp_path / "schedules").iterdir())
    assert written == [f"{stem}.png", f"{stem}.svg", f"{stem}.trace.json"]
    assert all(f"wrote schedules/{file}" in printed for file in written) and "wrote numbers.json" in printed
    ElementTree.parse(tmp_path / "schedules" / f"{stem}.svg")
    trace = json.loads((tmp_path / "schedules" / f"{stem}.trace.json").read_text())["traceEvents"]
    actions = [str(action) for row in timeline.schedule.actions for action in row]
    assert [event["name"] for event in trace if event["ph"] == "X"] == actions
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["bubble_fraction"] == timeline.bubble_fraction and numbers["makespan"] == timeline.makespan
    assert numbers["peak_activations"] == list(timeline.peak_activations)
    assert [event["action"] for row in numbers["events"] for event in row] == actions


def test_files_are_those_that_were_asked_for(tmp_path, capsys):
    assert schedule("name=1f1b", "ranks=2", "microbatches=2", "svg=a.svg") == 0
    assert schedule("name=1f1b", "ranks=2", "microbatches=2", "directory=null") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg"]
    assert schedule("name=1f1b", "ranks=2", "microbatches=2", "directory=deep/er") == 0
    assert len(list((tmp_path / "deep" / "er").iterdir())) == 3


def test_costs_by_hand(capsys):
    words = ("name=interleaved_1f1b", "ranks=2", "microbatches=4", "directory=null", "out=o.json")
    table = build_schedule("interleaved_1f1b", 2, 4)

    def makespan(*more):
        assert schedule(*words, *more) == 0
        capsys.readouterr()
        with open("o.json") as file:
            return json.load(file)["makespan"]

    per_stage = simulate(table, forward=[1, 2, 3, 4], input_grad=1.5, weight_grad=0.25, send=0.5).makespan
    assert makespan("forward=[1,2,3,4]", "input_grad=1.5", "weight_grad=0.25", "send=0.5") == per_stage
    assert makespan("backward=3") == simulate(table, input_grad=1.5, weight_grad=1.5).makespan
    assert (
        makespan("backward=[3,3,3,5]")
        == simulate(table, input_grad=[1.5] * 3 + [2.5], weight_grad=[1.5] * 3 + [2.5]).makespan
    )
    assert makespan("backward=2", "input_grad=1", "weight_grad=1") == makespan()


def test_the_schedule_of_a_run(capsys):
    """Ranks, microbatches and the split are the plan's, and a stage costs what its layers do."""
    words = ("experiment=first_run", "grid.tensor=1", "grid.pipeline=4", "pipeline.schedule=interleaved_1f1b")
    assert schedule(*words, "recompute=full", "directory=null", "out=o.json") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("interleaved_1f1b: 4 ranks, 8 microbatches, 2 stages a rank\n")
    with open("o.json") as file:
        numbers = json.load(file)
    counts = numbers["layers_per_stage"]
    assert sum(counts) == 12 and len(counts) == 8 and f"layers per stage {' '.join(map(str, counts))}" in printed
    costs = numbers["costs"]
    assert sum(costs["forward"]) / 8 == pytest.approx(1)
    # A recomputed layer runs forward twice, and its backward pass is two forward passes.
    for stage in range(1, 7):
        again = costs["input_grad"][stage] + costs["weight_grad"][stage]
        assert again == pytest.approx(3 * costs["forward"][stage])
    assert schedule(*words, "pipeline.layers_per_stage=[1,1,1,1,1,1,1,5]", "directory=null", "out=o.json") == 0
    with open("o.json") as file:
        uneven = json.load(file)
    assert uneven["layers_per_stage"] == [1] * 7 + [5]
    # Five layers and the head.
    assert uneven["costs"]["forward"][7] > 5 * uneven["costs"]["forward"][1]
    assert uneven["bubble_fraction"] > numbers["bubble_fraction"]


def test_costs_of_a_run_are_those_of_the_formulae(capsys):
    from gridtron.conf.compose import compose
    from gridtron.models.partition import layer_ranges

    assert schedule("model=gpt2_124m", "grid.pipeline=3", "directory=null", "out=o.json") == 0
    plan = compose(["model=gpt2_124m"])
    ranges = layer_ranges(plan.model, 3, None, plan.train.sequence_length)
    expected = stage_costs(plan.model, ranges, plan.train.sequence_length).weight_grad
    with open("o.json") as file:
        found = json.load(file)["costs"]["weight_grad"]
    assert [value / sum(found) for value in found] == pytest.approx([value / sum(expected) for value in expected])


def test_a_table_from_a_file(tmp_path, capsys):
    write_csv(build_schedule("zb_h1", 3, 5), tmp_path / "mine.csv")
    assert schedule("name=mine.csv", "directory=null") == 0
    printed = capsys.readouterr().out
    assert "3 ranks, 5 microbatches" in printed
    assert schedule("name=mine.csv", "ranks=2", "directory=null") == 2
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1B0,1F0\n")
    assert schedule("name=mine.csv", "directory=null") == 2
    refused = capsys.readouterr().err
    assert "1B0" in refused and "Traceback" not in refused and refused.count("\n") <= 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "schedule needs name=FAMILY ranks=N microbatches=M"),
        (["nme=zb_h1"], "nme=zb_h1: schedule has no option nme; nearest: name"),
        (["zb_h1"], "zb_h1: write key=value"),
        (["name=zb_h9", "ranks=2", "microbatches=2"], "name='zb_h9': it is one of gpipe"),
        (["name=zb_h1"], "name=zb_h1: ranks=N and microbatches=N must be given too"),
        (["name=zb_h1", "ranks=2"], "name=zb_h1: microbatches=N must be given too"),
        (["name=zb_h1", "ranks=0", "microbatches=x"], "ranks=0: must be at least 1\n  microbatches=x: needs an int"),
        (["name=1f1b", "ranks=2", "microbatches=2", "chunks=2"], "nearest: chunks=1"),
        (["name=1f1b", "ranks=2", "microbatches=2", "forward=-1"], "forward=-1: must be at least 0"),
        (["name=1f1b", "ranks=2", "microbatches=2", "forward=[1,2,3]"], "forward has 3 numbers for 2 stages"),
        (["name=1f1b", "ranks=2", "microbatches=2", "backward=3", "input_grad=1"], "backward=3.0 and input_grad"),
        (["name=1f1b", "ranks=2", "microbatches=2", "svg=a.pdf", "png=b"], "nearest: a.svg\n  png=b: the file's name"),
        (["name=1f1b", "ranks=2", "microbatches=2", "svg=/none/a.svg"], "svg=/none/a.svg: No such file or directory"),
        (["name=1f1b", "ranks=2", "microbatches=2", "directory=/dev/null/x"], "directory=/dev/null/x: Not a directory"),
        (["name=none.csv"], "the schedule none.csv cannot be read: No such file or directory"),
        (["experiment=first_run", "ranks=2"], "ranks=: the plan says it; set grid.pipeline instead"),
        (["experiment=first_run", "forward=2"], "forward=: the plan's stages cost what their layers do"),
        (["experiment=first_run", "grid.pipline=2"], "nearest: grid.pipeline"),
        (["experiment=first_run", "grid.pipeline=13"], "nearest: model.num_layers=13, grid.pipeline=12"),
        (["-m", "name=1f1b"], "-m: schedule draws one table"),
        (["--cfg", "job"], "--cfg: schedule draws one table"),
    ],
)
def test_refused(words, message, tmp_path, capsys):
    assert schedule(*words) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and printed.err.count("\n") < 12
    assert list(tmp_path.iterdir()) == []


def test_help(capsys):
    assert schedule("--help") == 0
    printed = capsys.readouterr().out
    assert "gridtron schedule name=zb_h1" in printed and "microbatches=null" in printed and "send=0.0" in printed
