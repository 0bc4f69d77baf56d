"""The main job through the real command: one curve on every grid, and an interrupted run that goes on on another."""

import json
import os
import subprocess
import sys

import pytest

SMALLER = [
    "experiment=first_run", "precision=fp64", "model.num_layers=2", "model.hidden_size=32", "model.dropout=0.1",
    "model.attention_dropout=0.1", "model.ffn_hidden_size=37", "train.sequence_length=32", "train.steps=20",
    "train.global_batch_size=8", "evaluation.every=4", "evaluation.steps=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of a few hundred kB, so that no test reads the whole standard library."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(5000)))
    return folder


def train(text, directory, *overrides, code=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(text), "XDG_CACHE_HOME": str(text / "cache")}
    words = [*SMALLER, f"data.path={text}/a.txt", f"run.directory={directory}", *overrides]
    done = subprocess.run(
        [sys.executable, "-m", "gridtron", "train", *words],
        capture_output=True, text=True, timeout=100, env=environment,
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-3000:]
    if code:
        return done.stderr
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(rows):
    return {row["step"]: row["loss"] for row in rows if "grad_norm" in row}


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    return train(text, tmp_path_factory.mktemp("run") / "whole", "train.stop_after=8", "grid.tensor=1")


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(["grid.tensor=2"], marks=pytest.mark.slow),
        pytest.param(["grid.tensor=1", "grid.data=2"], marks=pytest.mark.slow),
        pytest.param(["grid.tensor=2", "grid.data=2"], marks=pytest.mark.slow),
    ],
)
def test_one_curve_on_every_grid(grid, text, unbroken, tmp_path):
    rows = train(text, tmp_path / "run", "train.stop_after=8", *grid)
    for a, b in zip(rows, unbroken, strict=True):
        assert a.keys() == b.keys() and a["step"] == b["step"]
        for key in ("loss", "grad_norm", "eval_loss", "lr", "tokens"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=1e-10), (key, a["step"])


@pytest.mark.slow
def test_an_interrupted_run_goes_on_on_other_grids(text, unbroken, tmp_path):
    directory = tmp_path / "run"
    for stop, grid in [(3, "grid.tensor=2"), (5, "grid.data=2"), (8, "grid.tensor=1")]:
        others = {"grid.tensor": "grid.data=1", "grid.data": "grid.tensor=1"}[grid.split("=")[0]]
        rows = train(text, directory, f"train.stop_after={stop}", grid, others)
        assert max(losses(rows)) == stop
    expected = losses(unbroken)
    assert losses(rows) == {step: pytest.approx(loss, rel=1e-10) for step, loss in expected.items()}


@pytest.mark.slow
def test_data_that_changed_under_its_path_is_named(text, tmp_path):
    own = tmp_path / "mine.txt"
    own.write_text((text / "a.txt").read_text()[:20000])
    path = f"data.path={own}"
    train(text, tmp_path / "run", path, "grid.tensor=1", "train.stop_after=1", "evaluation.every=0")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with own.open("a") as file:
        file.write("One line more.\n")
    said = train(text, tmp_path / "run", path, "train.stop_after=2", code=1)
    assert "the data changed since this run read it" in said and "Traceback" not in said
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    rows = train(text, tmp_path / "run", path, "train.stop_after=2", "checkpoint.allow_changes=true")
    assert max(losses(rows)) == 2
