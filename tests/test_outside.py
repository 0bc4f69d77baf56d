"""Parts from outside this tree in ``gridtron train``: a model named by ``model.build``, and plugins of every kind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gridtron.core.training.metrics import read_rows
from gridtron.tools.cli import main

# Thirty lines that know nothing of gridtron: means of the embeddings so far, an MLP, a head.
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Average(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        x = x + x.cumsum(1) / count[:, None]
        x = x + self.mlp(self.norm(x))
        logits = self.head(x)
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

def build(config, grid):
    return Average(config.vocab_size, 16)


def build_without_grid(config):
    return Average(config.vocab_size, 16)


def build_a_list(config, grid):
    return []


class Mean(Average):
    def forward(self, tokens, targets):
        return super().forward(tokens, targets).mean()


class Logits(Average):
    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def build_mean(config, grid):
    return Mean(config.vocab_size, 16)


def build_logits(config, grid):
    return Logits(config.vocab_size, 16)
"""

# The same kind of model out of gridtron's layers, with an optimizer, a rate, data, a callback and a logger.
PLUGIN = """
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from gridtron.core.options import option
from gridtron.core.training.callbacks import BaseCallback
from gridtron.parallel import TensorParallelLinear, VocabParallelEmbedding, vocab_parallel_cross_entropy


@dataclass(frozen=True)
class SplitConfig:
    width: int = option(16, "of the residual stream", minimum=1)
    vocab_size: int | None = option(None, "null: the tokenizer's")


class Split(nn.Module):
    def __init__(self, config, axis):
        super().__init__()
        self.axis, width = axis, config.width
        self.embedding = VocabParallelEmbedding(config.vocab_size, width, axis)
        self.norm = nn.LayerNorm(width)
        self.up = TensorParallelLinear(width, 3 * width + 1, axis, "column")
        self.down = TensorParallelLinear(3 * width + 1, width, axis, "row")
        self.head = TensorParallelLinear(width, config.vocab_size, axis, "column", bias=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return vocab_parallel_cross_entropy(self.head(x), targets, self.axis)


def split(config, grid):
    return Split(config, grid.tensor)


@dataclass(frozen=True)
class StepsConfig:
    lr: float = option(0.05, "rate", minimum=0)


class Steps(torch.optim.Optimizer):
    # Signs of a moving average, with a count kept as a plain number, as older code does.
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"], state["average"] = 0, torch.zeros_like(parameter)
                state["count"] += 1
                state["average"].lerp_(parameter.grad, 1 / state["count"])
                parameter.sub_(group["lr"] * torch.tanh(100 * state["average"]))


def steps(config, grid):
    return lambda groups: Steps(groups, config.lr)


@dataclass(frozen=True)
class HalvesConfig:
    every: int = option(2, "steps after which the rate halves", minimum=1)


def halves(config, grid):
    return lambda step, base, total: base * 0.5 ** ((step - 1) // config.every)


@dataclass(frozen=True)
class CountingConfig:
    samples: int = option(64, "how many there are", minimum=1)
    length: int = option(16, "of each", minimum=1)


class Counting:
    def __init__(self, config):
        self.config = config

    def __len__(self):
        return self.config.samples

    def samples(self, indices):
        tokens = (np.asarray(indices)[:, None] * 7 + np.arange(self.config.length + 1)) % 97
        return tokens, np.zeros_like(tokens)


def counting(config, grid):
    return Counting(config), Counting(config)


@dataclass(frozen=True)
class WitnessConfig:
    folder: str = option("seen", "where each rank writes what it saw", path=True)


class Witness(BaseCallback):
    def __init__(self, config, rank):
        self.file, self.rank, self.losses = Path(config.folder), rank, []

    def on_step_end(self, step, row):
        self.losses.append(row["loss"])

    def on_end(self, step):
        self.file.mkdir(exist_ok=True)
        (self.file / f"{self.rank}.json").write_text(json.dumps(self.losses))

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


@dataclass(frozen=True)
class CopyConfig:
    file: str = option("copy.jsonl", "where the rows go", path=True)


class Copy:
    def __init__(self, config):
        self.file = open(config.file, "a")

    def log(self, row):
        self.file.write(json.dumps(row) + "\\n")

    def close(self):
        self.file.close()


def register(registry):
    registry.add("model", "split", SplitConfig, split)
    registry.add("optimizer", "steps", StepsConfig, steps)
    registry.add("lr_schedule", "halves", HalvesConfig, halves)
    registry.add("data", "counting", CountingConfig, counting)
    registry.add("callback", "witness", WitnessConfig, lambda config, grid: Witness(config, grid.rank))
    registry.add("logger", "copy", CopyConfig, lambda config, grid: Copy(config))
"""

SHORT = (
    "train.steps=4", "train.sequence_length=16", "train.global_batch_size=4", "train.micro_batch_size=1",
    "precision=fp64", "logging.tensorboard=false", "evaluation.every=2", "evaluation.steps=2",
)  # fmt: skip


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A working directory outside the tree with the modules and a text; nothing of it stays imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "their_model.py").write_text(MODEL)
    (tmp_path / "their_plugin.py").write_text(PLUGIN)
    (tmp_path / "text.txt").write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(300)))
    before = signal.getsignal(signal.SIGINT)
    yield tmp_path
    signal.signal(signal.SIGINT, before)
    for name in ("their_model", "their_plugin"):
        sys.modules.pop(name, None)


def train(directory, *overrides):
    """A run in this process, its ranks (where it has several) forked from it; its exit code."""
    return main(["train", *SHORT, f"run.directory={directory}", *overrides])


def command(directory, *overrides):
    """A run by the command, in a process of its own."""
    words = [sys.executable, "-m", "gridtron", "train", *SHORT, f"run.directory={directory}", *overrides]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)


def losses(directory):
    rows = read_rows(Path(directory) / "metrics.jsonl")
    return [row.get("loss", row.get("eval_loss")) for row in rows]


# ---------------------------------------------------------------- model.build
def test_a_foreign_module_trains_on_any_grid(outside):
    """Losses of every step and evaluation; the weights of the last step too, since an error there shows one step on."""
    overrides = ("model.build=their_model:build", "data.path=text.txt", "optimizer.lr=0.01")
    result = command("two", *overrides, "grid.data=2")
    assert result.returncode == 0, result.stderr
    assert train("one", *overrides, "train.micro_batch_size=4") == 0
    assert train("tensor", *overrides, "grid.tensor=2", "train.micro_batch_size=2") == 0
    assert len(losses("one")) == 6 and losses("one")[0] > losses("one")[-1]
    assert losses("two") == pytest.approx(losses("one"), rel=1e-10)
    # Without layers that are split every tensor rank holds the whole: that trains the same, and the norm counts once.
    assert losses("tensor") == pytest.approx(losses("one"), rel=1e-10)
    norms = [[row["grad_norm"] for row in read_rows(Path(run) / "metrics.jsonl") if "grad_norm" in row]
             for run in ("one", "two", "tensor")]  # fmt: skip
    assert norms[1] == pytest.approx(norms[0], rel=1e-10) and norms[2] == pytest.approx(norms[0], rel=1e-10)


def test_a_foreign_module_against_a_loop_of_its_own(outside):
    """The one-process run is what a dozen lines of plain torch give from the same weights and samples."""
    overrides = ("model.build=their_model:build", "data=counting", "plugins=[their_plugin]", "~callbacks.witness",
                 "~loggers.copy", "optimizer=sgd", "optimizer.lr=0.1", "optimizer.grad_clip=0.5",
                 "optimizer.weight_decay=0", "optimizer.momentum=0", "lr_schedule=constant",
                 "model.vocab_size=97")  # fmt: skip
    assert train("one", *overrides, "evaluation.every=0") == 0
    import their_model
    import their_plugin
    import torch

    from gridtron.core.data.stream import TrainingStream

    torch.manual_seed(0)
    model = their_model.Average(97, 16).double()
    stream, position, found = TrainingStream(their_plugin.Counting(their_plugin.CountingConfig()), 0, 4, 4), 0, []
    for _ in range(4):
        (batch,) = stream.microbatches(position)
        loss = model(batch.tokens, batch.targets).mean()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        found.append(loss.item())
        position = stream.next_position(position)
    # clip_grad_norm_ adds 1e-6 to the norm.
    assert losses("one") == pytest.approx(found, rel=1e-5) and losses("one")[0] == pytest.approx(found[0], rel=1e-12)


# ---------------------------------------------------------------- plugins
CHOSEN = ("plugins=[their_plugin]", "model=split", "optimizer=steps", "lr_schedule=halves", "data=counting",
          "model.vocab_size=97")  # fmt: skip


def test_a_plugins_parts_train_on_any_grid(outside):
    result = command(
        "data", *CHOSEN, "grid.data=2", "callbacks.witness.folder=seen by two", "loggers.copy.file=a.jsonl"
    )
    assert result.returncode == 0, result.stderr
    assert train("one", *CHOSEN, "train.micro_batch_size=2") == 0
    assert train("tensor", *CHOSEN, "grid.tensor=2", "~callbacks.witness", "~loggers.copy") == 0
    assert losses("data") == pytest.approx(losses("one"), rel=1e-10)
    assert losses("tensor") == pytest.approx(losses("one"), rel=1e-10)
    rows = read_rows(Path("data/metrics.jsonl"))
    assert [row["lr"] for row in rows if "lr" in row] == [0.05, 0.05, 0.025, 0.025]
    assert losses("one")[-1] < losses("one")[1]
    # The callback ran on every rank, the logger on rank 0 alone.
    seen = [json.loads(Path("seen by two", f"{rank}.json").read_text()) for rank in (0, 1)]
    assert seen[0] == seen[1] == [row["loss"] for row in rows if "grad_norm" in row]
    assert [json.loads(line)["step"] for line in Path("a.jsonl").read_text().splitlines()] == [1, 2, 2, 3, 4, 4]
    assert sorted(os.listdir("seen")) == ["0.json"]


@pytest.mark.parametrize("grid", [pytest.param(f"grid.tensor={size}", marks=pytest.mark.slow) for size in (1, 2)])
def test_a_plugins_run_goes_on_to_the_bit(outside, grid):
    """Also the states of a foreign optimizer, its plain numbers and the callback's."""
    assert train("whole", *CHOSEN, grid, "callbacks.witness.folder=whole seen") == 0
    assert train("parts", *CHOSEN, grid, "train.stop_after=2", "callbacks.witness.folder=parts seen") == 0
    assert main(["train", "run.directory=parts"]) == 0
    assert losses("parts") == losses("whole")
    assert Path("parts seen/0.json").read_text() == Path("whole seen/0.json").read_text()
    # And on another grid.
    other = "grid.tensor=2" if grid == "grid.tensor=1" else "grid.tensor=1"
    assert train("moved", *CHOSEN, grid, "train.stop_after=2", "~callbacks.witness") == 0
    assert main(["train", "run.directory=moved", other]) == 0
    assert losses("moved") == pytest.approx(losses("whole"), rel=1e-10)


def test_an_optimizer_whose_states_cannot_be_saved_is_told_at_once(outside, capfd):
    """Adafactor keeps row and column means: of a split parameter they are neither whole nor like it."""
    Path("factored.py").write_text(
        PLUGIN.replace("return lambda groups: Steps(groups, config.lr)",
                       "return lambda groups: torch.optim.Adafactor(groups, lr=config.lr)")
    )  # fmt: skip
    chosen = ("plugins=[factored]", *CHOSEN[1:], "~callbacks.witness", "~loggers.copy")
    try:
        assert train("one", *chosen) == 0
        capfd.readouterr()
        assert train("two", *chosen, "grid.tensor=2") == 1
    finally:
        sys.modules.pop("factored", None)
    printed = capfd.readouterr().err
    assert "use grid.tensor=1 with this optimizer" in printed and "Traceback" not in printed
    assert read_rows(Path("two/metrics.jsonl")) == []


# ---------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.build=their_model:build_without_grid"], "cannot be called as (config, grid)"),
        (["model.build=their_model:biuld"], "nearest: build"),
        (["model.build=their_modle:build"], "no module"),
        (["model.build=their_model"], "write MODULE:FUNCTION"),
        (["plugins=[their_model]"], "it has no function register(registry)"),
        (["plugins=[their_plugin]", "model=splt"], "nearest: split"),
        (["plugins=[their_plugin]", "model=split", "model.widht=3"], "nearest: model.width"),
        (["plugins=[their_plugin]", "callbacks.witnes.folder=x"], "nearest: callbacks.witness"),
        (["plugins=[their_plugin]", "data=counting"], "set model.vocab_size"),
        (["plugins=[wrong]"], "cannot be called as (config, grid)"),
    ],
)
def test_wrong_signatures_and_names_start_nothing(outside, capfd, overrides, message):
    Path("wrong.py").write_text(PLUGIN.replace("def steps(config, grid):", "def steps(grid):"))
    result = train("run", "data.path=text.txt", *overrides, "grid.data=2")
    sys.modules.pop("wrong", None)
    printed = capfd.readouterr()
    assert result == 2 and printed.out == ""
    assert message in printed.err and len(printed.err.splitlines()) < 12 and "Traceback" not in printed.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        ("build_a_list", "the builder gave a list; it returns an nn.Module"),
        ("build_logits", "Logits.forward(tokens) cannot be called as forward(tokens, targets)"),
        ("build_mean", "the model's losses have the shape ()"),
    ],
)
def test_models_that_cannot_be_trained_end_in_a_message(outside, capfd, builder, message):
    """What shows only once the model is built, on the ranks: once, and without a traceback."""
    code = train("run", f"model.build=their_model:{builder}", "data.path=text.txt", "grid.data=2")
    printed = capfd.readouterr().err
    assert code == 1
    assert printed.count(message) == 1 and "Traceback" not in printed
    assert read_rows(Path("run/metrics.jsonl")) == []
