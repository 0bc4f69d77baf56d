"""Every command and every example of README.md is run, or composed where it needs a cluster, as its mark says.

A mark is a comment before a block: ``run`` (shell, here), ``compose`` (shell, for a launcher), ``make``, ``bench``,
``mlp`` (Python, by python and torchrun), ``ranks; same: NAMES`` (Python, on 1 and 2 ranks, where NAMES come out the
same), ``file NAME`` (Python, a module that a command uses).
"""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from gridtron.conf.compose import check_request, compose
from gridtron.conf.refusal import Refusal
from gridtron.conf.rules import Surroundings
from gridtron.core.training.metrics import read_rows
from gridtron.tools.bench.cli import benchmarks, parse_options
from gridtron.tools.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

FASTER = {"train.steps=200": "train.steps=2", "train.stop_after=100": "train.stop_after=1"}
"""The README's long runs, shortened."""
SMALLER = (
    "train.sequence_length=16",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "model.num_layers=1",
    "logging.tensorboard=false",
)


@dataclass(frozen=True)
class Block:
    mark: str
    language: str
    text: str

    @property
    def kind(self) -> str:
        return self.mark.partition(";")[0].split()[0]

    @property
    def lines(self) -> list[list[str]]:
        """Words of each shell command, without comments."""
        joined = self.text.replace("\\\n", " ").splitlines()
        return [words for line in joined if (words := shlex.split(line, comments=True))]


BLOCKS = [Block(*found) for found in re.findall(r"<!-- test: (.+?) -->\n```(\w+)\n(.*?)```", README, re.DOTALL)]


def of_kind(kind):
    return [block for block in BLOCKS if block.kind == kind]


def commands(kind):
    return [words for block in of_kind(kind) for words in block.lines]


def test_every_block_has_a_mark():
    assert README.count("```") == 2 * len(BLOCKS)
    assert {block.kind for block in BLOCKS} == {"make", "run", "compose", "bench", "mlp", "ranks", "file"}


def test_the_readme_opens_with_two_commands():
    opening = README.split("```")[1]
    assert [line.split("#")[0].strip() for line in opening.splitlines()[1:4]] == [
        "make train", "make test", "source .venv/bin/activate",
    ]  # fmt: skip


def test_links_lead_somewhere():
    assert all((ROOT / target).exists() for target in re.findall(r"\]\((?!https?:)([^)#]+)", README))
    for page in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        paths = set(re.findall(r"`((?:core|parallel|models|conf|tools|tests|docs)/[\w./]*)`", page))
        missing = {path for path in paths if not (ROOT / path).exists()}
        # Where pipeline schedules will go is told before there are any.
        assert len(paths) > 2 and missing <= {"parallel/pipeline/"}


# ---------------------------------------------------------------- make and bench
def test_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", " ".join(block.text for block in BLOCKS) + README))
    assert {"train", "test", "peers"} <= named <= targets
    assert "TORCH_INDEX=URL" in README and "TORCH_INDEX" in (ROOT / "Makefile").read_text()


def test_make_train_is_what_the_readme_says():
    assert "gridtron train experiment=first_run" in (ROOT / "Makefile").read_text()
    plan = compose(["experiment=first_run"], surroundings=AROUND)
    assert (plan.model.num_layers, plan.grid.tensor, plan.grid.sequence_parallel) == (12, 2, True)
    size, length = plan.train.global_batch_size, plan.train.sequence_length
    told = f"{plan.train.steps} steps of {size} x {length} bytes"
    words = " ".join(README.split())
    assert told in words and f"held-out text, every {plan.evaluation.every} steps" in words


def test_bench_takes_the_options():
    lines = [words for words in commands("bench") if words[0] == "gridtron"]
    assert lines
    for _, word, name, *options in lines:
        assert word == "bench" and name in benchmarks()
        assert parse_options(options).out == "bench.json"


# ---------------------------------------------------------------- commands, run
@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A home with books, the README's modules, a corpus and a tokenizer; one for all commands, as for its reader."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "books").mkdir()
    for name in ("one", "two"):
        (folder / "books" / f"{name}.txt").write_text(
            "It was a dark and stormy night; the rain fell in torrents.\n" * 99
        )
    (folder / "corpus.jsonl").write_text('{"text": "a b a a b"}\n' * 900)
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    for block in of_kind("file"):
        (folder / block.mark.split()[1]).write_text(block.text)
    before, patch = signal.getsignal(signal.SIGINT), pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.setattr(sys, "path", list(sys.path))
    for name, value in {"HOME": str(folder), "OMP_NUM_THREADS": "1"}.items():
        patch.setenv(name, value)
    for name in ("XDG_CACHE_HOME", "RANK", "WORLD_SIZE", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"):
        patch.delenv(name, raising=False)
    yield folder
    patch.undo()
    signal.signal(signal.SIGINT, before)
    for block in of_kind("file"):
        sys.modules.pop(block.mark.split()[1].removesuffix(".py"), None)


def run(words):
    """Runs one line; the folder that it trained in, or None."""
    assert words[0] == "gridtron"
    words = [FASTER.get(word, word) for word in words[1:]]
    given = [word.partition("=")[2] for word in words if word.startswith("run.directory=")]
    if words[0] == "train" and "--cfg" not in words and not (given and Path(given[0]).exists()):
        words[1:1] = SMALLER
    before = set(Path("runs").glob("*"))
    assert main(words) == 0, words
    made = set(Path("runs").glob("*")) - before
    return Path(given[0]) if given else made.pop() if made else None


def steps(folder):
    return [row["step"] for row in read_rows(folder / "metrics.jsonl") if "grad_norm" in row]


@pytest.mark.parametrize("block", of_kind("run"), ids=lambda block: " ".join(block.lines[0][:3]))
def test_commands(block, place, capfd):
    for words in block.lines:
        folder = run(words)
        printed = capfd.readouterr()
        if words[1] != "train" or "--cfg" in words:
            assert folder is None and printed.out
            continue
        for job in [folder / "0", folder / "1"] if "-m" in words else [folder]:
            assert steps(job) == ([1] if "train.stop_after=100" in words else [1, 2]), printed.err
    if "out=summary.json" in block.text:
        assert Path("summary.json").exists() and Path("doctor.json").exists()
    if "my_plugin" in block.text:
        assert "step 1 is under 9.0" in printed.out


def test_a_run_holds_what_the_table_says(place, capfd):
    table = README.split("### What a run directory holds")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", table, re.MULTILINE))
    more = ("logging.tensorboard=true", "logging.profile=2:2", "evaluation.every=2", "run.directory=held")
    more += ("logging.trace=true", "grid.pipeline=2", "model.num_layers=2")
    folder = run(["gridtron", "train", "train.steps=200", *more])
    assert {name.split("/")[0] for name in rows} == {entry.name for entry in folder.iterdir()}
    assert {entry.suffix for entry in (folder / "checkpoints" / "step-00000002").iterdir()} == {".safetensors", ".json"}
    named = set(re.findall(r"`(\w+)`", rows["metrics.jsonl"]))
    assert named == {key for row in read_rows(folder / "metrics.jsonl") for key in row} - {"eval_tokens"}


# ---------------------------------------------------------------- commands, composed
AROUND = Surroundings(cores=8, data_fault=lambda config: None, folder_fault=lambda folder: None)


def launched(words):
    """Processes that a launcher's line starts, and the words after ``gridtron train``."""
    start = words.index("gridtron")
    assert words[start + 1] == "train"
    options = dict(itertools.pairwise(words[1:start]))
    if words[0] == "srun":
        return int(options["--ntasks"]), words[start + 2 :]
    assert words[0] == "torchrun" and words[start - 1] == "-m"
    return int(options.get("--nnodes", 1)) * int(options["--nproc-per-node"]), words[start + 2 :]


@pytest.mark.parametrize("words", commands("compose"), ids=lambda words: " ".join(words[:3]))
def test_lines_for_launchers_compose(words, place):
    count, overrides = launched(words)
    plan = compose(overrides, surroundings=Surroundings(launched=count))
    assert count > plan.grid.tensor == 8 or count == 8
    assert plan.model.hidden_size >= 4096


def test_options_in_the_text_exist():
    spans = [span.removeprefix("gridtron train ").split() for span in re.findall(r"`([^`\n]+=[^`\n]*)`", README)]
    told = [words for words in spans if all(re.match(r"[a-z_.]+=[^=]", word) for word in words)]
    assert len(told) >= 5
    for words in told:
        if words != ["key=value"]:
            assert check_request(words).checked.violations == [], words


@pytest.mark.parametrize("override", ["grid.context=2", "data.packing=true", "logging.wandb=true"])
def test_what_is_not_built_is_refused_by_name(override):
    with pytest.raises(Refusal, match="not built yet"):
        compose([override], surroundings=AROUND)


def test_the_table_of_presets_is_whole():
    presets = " ".join(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))
    families = {"GPT-2": "gpt2_", "GPT-3": "gpt3_", "Llama 2": "llama2_", "Qwen2.5": "qwen25_", "Llama 3": "llama3_"}
    assert all(name in README and stem in presets for name, stem in families.items())
    ours = set(presets.split()) - {name for name in presets.split() if name.startswith(("gpt", "llama", "qwen"))}
    assert ours == {"tiny", "small", "first_run"}


# ---------------------------------------------------------------- Python
def test_a_layer_in_fifteen_lines(tmp_path):
    """The same file under python and torchrun prints the same loss."""
    (block,) = of_kind("mlp")
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 15
    (tmp_path / "mlp.py").write_text(block.text)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    starters = (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], [])
    jobs = [
        subprocess.Popen(
            [sys.executable, *starter, "mlp.py"], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
        )
        for starter in starters
    ]
    printed = [job.communicate(timeout=90)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert printed[0] == printed[1] and re.fullmatch(r"loss 0\.\d{6}\n", printed[0])


def execute(text, names):
    """What a block left under ``names``: run on a rank of the pool."""
    left = {"__name__": "block"}
    exec(compile(text, "README.md", "exec"), left)
    values = {name: left[name] for name in names}
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}, {
        name: left[name] for name in ("sent",) if name in left
    }


@pytest.mark.parametrize("block", of_kind("ranks"), ids=lambda block: block.mark)
def test_examples_give_the_same_on_one_rank_and_two(block):
    names = [name.strip() for name in block.mark.partition("same:")[2].split(",")]
    ((alone, sent_alone),) = run_ranks(execute, 1, block.text, names)
    for values, sent in run_ranks(execute, 2, block.text, names):
        torch.testing.assert_close(values, alone, rtol=1e-5, atol=1e-6)
        if sent:
            assert sent["sent"]["tensor", "reduce_scatter"][0] > 0 and sent_alone["sent"] == {}
