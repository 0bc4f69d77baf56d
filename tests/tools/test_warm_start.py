"""Runs of the command line that begin with weights from elsewhere, and go on from their own checkpoints."""

import json
import shutil
import signal
from dataclasses import replace

import parity
import pytest
import torch
import yaml
from safetensors.torch import load_file

from gridtron.models import GPT
from gridtron.models.huggingface import save_huggingface
from gridtron.parallel import full_state_dict
from gridtron.tools.convert import main as convert
from gridtron.tools.train import main

CONFIG = replace(parity.FAMILIES["qwen"], num_attention_heads=4, head_dim=None, ffn_hidden_size=24, vocab_size=260)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory with a text, a cache of its own, no launcher; a source of weights beside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("What one says first, another says again. " * 200)
    state = full_state_dict(GPT(CONFIG, seed=9))
    save_huggingface(tmp_path / "source", CONFIG, state.__getitem__, torch.float32)
    before = signal.getsignal(signal.SIGINT)
    yield tmp_path
    signal.signal(signal.SIGINT, before)


def train(capfd, directory, *overrides):
    small = (
        "data.path=text.txt", "train.steps=2", "train.sequence_length=16", "train.global_batch_size=4",
        "train.micro_batch_size=2", "precision=fp32", "logging.tensorboard=false", f"run.directory={directory}",
    )  # fmt: skip
    code = main([*small, *overrides])
    printed = capfd.readouterr()
    return code, printed.out + printed.err


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.case(9)
def test_a_run_begins_with_weights_and_goes_on_without_them(place, capfd):
    """At rate 0 the loss stays that of the weights; the run's own checkpoint is what a second start goes on from."""
    code, said = train(capfd, "run", "checkpoint.init_from=source", "optimizer.lr=0.0", "train.stop_after=1")
    assert code == 0, said
    assert f"weights from {place / 'source'} (qwen2); the optimizer begins anew" in said
    (row,) = rows(place / "run")
    assert yaml.safe_load((place / "run" / "config.yaml").read_text())["model"]["hidden_size"] == 16
    environment = json.loads((place / "run" / "environment.json").read_text())
    assert environment["init_from"] == {"path": str(place / "source"), "kind": "qwen2"}
    weights = load_file(place / "source" / "model.safetensors")
    shutil.rmtree(place / "source")
    code, said = train(capfd, "run", "optimizer.lr=0.0")
    assert code == 0 and "goes on from" in said and "weights from" not in said
    assert [row["step"] for row in rows(place / "run")] == [1, 2]
    # Another run begins with the first one's weights, in another format and on other shapes of a batch.
    code, said = train(capfd, "second", "checkpoint.init_from=run", "optimizer.lr=0.0", "train.micro_batch_size=4")
    assert code == 0 and "(checkpoint); the optimizer begins anew" in said
    assert rows(place / "second")[0]["loss"] == pytest.approx(row["loss"], rel=1e-6)
    # What was trained at rate 0 is written as it was read.
    assert convert([f"source={place / 'second'}", f"target={place / 'exported'}"]) == 0
    written = load_file(place / "exported" / "model.safetensors")
    assert written.keys() == weights.keys() and all(torch.equal(written[key], weights[key]) for key in weights)
    # The same model from its own seed is another: what was equal was not so by chance.
    shape = [f"model.{name}={'null' if value is None else value}" for name, value in vars(CONFIG).items()]
    code, said = train(capfd, "third", *shape, "optimizer.lr=0.0")
    assert code == 0 and abs(rows(place / "third")[0]["loss"] - row["loss"]) > 1e-3


@pytest.mark.slow
def test_without_a_checkpoint_of_its_own_the_source_is_asked_again(place, capfd):
    """A start that ended before its first checkpoint begins with the same weights; without them it is refused."""
    code, _ = train(capfd, "run", "checkpoint.init_from=source", "train.stop_after=1")
    first = rows(place / "run")
    shutil.rmtree(place / "run" / "checkpoints")
    assert code == 0
    code, said = train(capfd, "run", "train.stop_after=1")
    assert code == 0 and "weights from" in said and "holds no checkpoint: starts from step 1" in said
    assert rows(place / "run")[0]["loss"] == first[0]["loss"]
    shutil.rmtree(place / "run" / "checkpoints")
    (place / "source").rename(place / "moved")
    code, said = train(capfd, "run")
    assert code == 2 and f"checkpoint.init_from={place / 'source'}: no such folder" in said
    code, said = train(capfd, "run", "checkpoint.init_from=moved", "train.stop_after=1")
    assert code == 0 and rows(place / "run")[0]["loss"] == first[0]["loss"]


def test_what_is_refused_leaves_no_folder(place, capfd):
    code, said = train(capfd, "run", "checkpoint.init_from=source", "model.hidden_size=32")
    assert code == 2 and "model.hidden_size=32 (16 there)" in said and not (place / "run").exists()
