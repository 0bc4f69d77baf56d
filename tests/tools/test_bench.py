"""The bench's arithmetic, its refusals, and one small run of it; no timed claim."""

import importlib.util
import json
import random
import statistics

import pytest

from gridtron.tools.bench.cli import BenchOptions, main, parse_options
from gridtron.tools.bench.measure import Contender, alternate, compare, median_interval


def test_interval_of_the_median_covers_as_promised():
    generator = random.Random(5)
    draws = [[generator.gauss(0, 1) for _ in range(20)] for _ in range(2000)]
    covered = statistics.mean(low <= 0 <= high for low, high in map(median_interval, draws))
    assert 0.95 <= covered <= 0.97
    assert median_interval(range(20)) == (5, 14)
    assert median_interval([3.0, 1.0, 2.0, 4.0]) == (1.0, 4.0)


def test_every_contender_runs_as_often_in_every_place():
    order = []

    def contender(name):
        return Contender(name, lambda index: order.append((index, name)) or float(index))

    seconds, losses = alternate([contender(name) for name in "abc"], 6, 3, lambda: None)
    assert all(len(values) == 6 for values in seconds.values())
    assert losses["a"] == losses["b"] == [float(index) for index in range(9)]
    places = [[name for _, name in order[3 * index : 3 * index + 3]] for index in range(9)]
    assert all([place[slot] for place in places].count(name) == 3 for slot in range(3) for name in "abc")
    ratio = compare({"a": [1.0, 2.0, 3.0, 4.0], "b": [2.0, 4.0, 6.0, 8.0]}, "a", "b")
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.5, 0.5) and ratio.holds(0.5) and not ratio.holds(0.49)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tensor_paralel"], "tensor_parallel"),
        (["tensor_parallel", "shape=huge"], "shape=huge"),
        (["tensor_parallel", "pears=3"], "pairs"),
        (["tensor_parallel", "pairs=0"], "pairs=0"),
        (["tensor_parallel", "out=nowhere/at/all.json"], "there is no folder"),
        (["tensor_parallel", "chart=step.svg"], "only bench step"),
        (["step", "chart=step.gif"], ".svg, .png, .pdf"),
        (["step", "chart=nowhere/step.svg"], "there is no folder"),
        (["pipeline", "microbatches=3"], "nearest: 2"),
    ],
)
def test_refusals(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_every_shape_has_the_batch_that_the_options_know():
    from gridtron.tools.bench import cli
    from gridtron.tools.bench.plain import SHAPES

    assert {shape.batch for shape in SHAPES.values()} == {cli._BATCH}


def test_options():
    assert parse_options(["shape=full", "pairs=8", "out=a=b.json"]) == BenchOptions("full", 8, out="a=b.json")
    assert main(["--help"]) == 0


@pytest.mark.slow
def test_a_small_run(tmp_path, capfd):
    out = tmp_path / "figures.json"
    assert main(["tensor_parallel", "shape=tiny", "pairs=4", "warmup=1", f"out={out}", f"peers={tmp_path}/none"]) == 0
    figures = json.loads(out.read_text())
    # The developers' environment has transformers, for the tests of its weights; nothing has Megatron-core.
    found = importlib.util.find_spec("transformers") is not None
    assert figures["missing"] == (["Megatron-core"] if found else ["Megatron-core", "Hugging Face"])
    assert "missing: Megatron-core (make peers installs it)" in capfd.readouterr().out
    sections = figures["sections"]
    assert [section["ranks"] for section in sections] == [1, 2, 2]
    for section, peer in zip(sections, ["plain module", "DTensor", "DTensor sequence"], strict=True):
        assert section["equal_losses"] and section["ratios"][0]["peer"] == peer
        assert section["losses"][peer][0] == pytest.approx(sections[0]["losses"]["gridtron"][0], abs=1e-5)
    assert figures["environment"]["versions"]["torch"]


def test_sleeping_stages_take_what_they_say():
    """F, I and W sleep one unit each, whether the backward pass is split or not; no claim on the total."""
    import time

    import torch
    from torch.autograd.graph import get_gradient_edge

    from gridtron.parallel.gradient_door import Deferral
    from gridtron.parallel.pipeline.split_backward import backward_input
    from gridtron.tools.bench.sleeps import SECONDS, Sleep

    stage, deferral = Sleep(), Deferral()
    deferral.watch(stage.parameters())
    x = torch.ones(1, requires_grad=True)
    with deferral.splitting(True):
        edge = get_gradient_edge(stage(x))
    start = time.perf_counter()
    found, work = backward_input([edge], [torch.ones(1)], [x], list(stage.parameters()), deferral)
    between = time.perf_counter()
    for finish in work:
        finish()
    assert found[0] is not None and len(work) == 1
    assert between - start >= SECONDS and time.perf_counter() - between >= SECONDS
    start = time.perf_counter()
    stage(x).backward()
    assert time.perf_counter() - start >= 3 * SECONDS


def test_a_pipeline_section_of_the_tiny_shape(tmp_path):
    """torch's pipelining and this runner give equal losses from equal weights."""
    from gridtron.tools.bench.cli import BenchOptions
    from gridtron.tools.bench.pipeline import makers
    from gridtron.tools.bench.sections import Section, run_sections

    out = tmp_path / "out.json"
    options = BenchOptions(shape="tiny", pairs=4, warmup=0, ranks=2, peers=str(tmp_path), out=str(out))
    settings = {"schedule": "1f1b", "microbatches": 2}
    section = Section("tiny", "tiny", 2, makers, "pipeline", settings, memory=True)
    assert run_sections(options, [section], ()) == 0
    (record,) = json.loads(out.read_text(encoding="utf-8"))["sections"]
    assert record["equal_losses"] and set(record["seconds"]) == {"gridtron 1f1b", "torch 1f1b"}
    assert set(record["memory_bytes"]) == set(record["seconds"])


# ---------------------------------------------------------------- the scoreboard
def record(title, *ratios):
    return {"title": title, "ratios": [dict(zip(("peer", "median", "low", "high"), r, strict=False)) for r in ratios]}


@pytest.mark.parametrize("name", ["step.svg", "step.png"])
def test_a_chart_shows_every_ratio(name, tmp_path):
    from gridtron.tools.bench.chart import draw_chart

    sections = [record("one process", ("plain module", 0.9, 0.88, 0.93), ("Hugging Face", 1.1, 1.0, 1.2))]
    sections[0]["ratios"][0] |= {"bound": 0.95, "holds": True}
    figures = {"environment": {"processor": "a processor", "cores": 2}, "sections": sections}
    draw_chart(figures, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml") and len(content) > 5000


def test_bars_have_their_lengths():
    from gridtron.tools.bench.chart import bar_of

    assert [bar_of(ratio).count("█") for ratio in (0.0, 0.5, 1.5, 2.0, 9.0)] == [0, 10, 29, 39, 39]
    assert all(len(bar_of(ratio)) == 40 and bar_of(ratio).count("|") == 1 for ratio in (0.0, 0.96, 1.0, 1.04, 3.0))


def test_the_floor_has_the_products_of_a_step():
    """Forward and backward of every linear layer and of whole attention squares: three times the forward's FLOPs."""
    from torch.utils.flop_counter import FlopCounterMode

    from gridtron.tools.bench.floor import products_alone
    from gridtron.tools.bench.plain import SHAPES

    shape = SHAPES["tiny"]
    with FlopCounterMode(display=False) as counter:
        products_alone(shape).step(0)
    tokens, width = shape.batch * shape.sequence, shape.hidden // shape.heads
    weights = shape.layers * shape.hidden * (2 * shape.hidden + 2 * shape.key_value_heads * width + 3 * shape.ffn)
    weights += shape.hidden * shape.vocabulary
    attention = shape.layers * 2 * shape.sequence * shape.hidden
    assert counter.get_total_flops() == 3 * 2 * tokens * (weights + attention)


@pytest.mark.slow
def test_the_scoreboard(tmp_path, capfd):
    out, chart = tmp_path / "step.json", tmp_path / "step.svg"
    words = ["shape=tiny", "pairs=4", "warmup=1", "microbatches=2", f"out={out}", f"chart={chart}"]
    assert main(["step", *words, f"peers={tmp_path}/none"]) == 0
    figures = json.loads(out.read_text())
    assert len(figures["loss_memory"]["peak_bytes"]) == 3
    sections = figures["sections"]
    assert [section["title"].partition(", ")[2] for section in sections] == [
        "one process", "tensor=2", "data=2", "data=2, zero=3", "pipeline=2, 1F1B, 2 microbatches"
    ]  # fmt: skip
    assert all(section["equal_losses"] for section in sections)
    assert {ratio["peer"]: ratio.get("bound") for ratio in sections[0]["ratios"]}["plain module"] == 0.95
    assert chart.stat().st_size > 5000 and "as a share of the peer's" in capfd.readouterr().out
