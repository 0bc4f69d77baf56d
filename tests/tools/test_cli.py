"""The command line: what it prints, its exit codes, and that a refusal is short and starts nothing."""

import os
import subprocess
import sys

import pytest
import yaml

from gridtron.conf.refusal import Refusal
from gridtron.tools.arguments import Arguments, compose_or_exit_code, parse_arguments
from gridtron.tools.cli import main
from gridtron.tools.pages import COMMANDS


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty working directory and cache of its own."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "work"


def refused(capsys, *arguments):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("gridtron: refused")
    assert len(printed.err.splitlines()) < 12 and "Traceback" not in printed.err
    assert os.listdir(".") == []
    return printed.err


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "gridtron", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


# ---------------------------------------------------------------- pages
def test_help_of_all(capsys):
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"  {name} " in page for name in COMMANDS) and "gridtron train experiment=first_run" in page
    assert "--cfg job" in page and "Exit codes" in page


@pytest.mark.parametrize("word", COMMANDS)
def test_help_of_one(capsys, word):
    assert main([word, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: gridtron {word} ")
    assert all(f"  {other} " not in page.split("Options")[0] for other in COMMANDS if other != word)


def test_nothing_prints_the_page_and_is_wrong(capsys):
    assert main([]) == 2 and "usage: gridtron" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("gridtron 0.")


@pytest.mark.parametrize("word", COMMANDS)
def test_examples_of_the_page_are_right(word):
    """Each example for one process is composed, or parsed where it is a sweep or needs files."""
    for example in COMMANDS[word].examples:
        words = example.partition("    ")[0].split()
        assert words[words.index("gridtron") + 1] == word
        arguments = parse_arguments(words[words.index("gridtron") + 2 :])
        assert all("=" in item or word in ("bench", "checkpoint") for item in arguments.overrides)


# ---------------------------------------------------------------- flags
def test_flags():
    assert parse_arguments(["a=1", "-m", "--cfg", "job", "--config-dir", "x", "-cd=y", "b=-1"]) == Arguments(
        ("a=1", "b=-1"), ("x", "y"), sweep=True, show=True
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "5"], "--steps: no such flag"),
        (["--cfg"], "--cfg: a value is missing"),
        (["--cfg", "hydra"], "nearest: --cfg job"),
        (["--config-dir", "-m"], "--config-dir: a value is missing"),
        (["-x", "-y"], "-y: no such flag"),
    ],
)
def test_flags_that_are_wrong(words, message):
    with pytest.raises(Refusal) as caught:
        parse_arguments(words)
    assert message in str(caught.value)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "trian: no such command; nearest: train"),
        (["grid.tensor=2"], "a command comes first; nearest: gridtron train grid.tensor=2"),
        (["zzz"], f"there are {', '.join(COMMANDS)}"),
        (["train", "first_run"], "write experiment=first_run"),
        (["train", "--steps=5"], "no such flag"),
        (["train", "data.path=/no/such file, at=all/'x'.txt"], "no such file"),
        (["train", "data.path=~/no such/*.txt"], "no file matches the pattern"),
        (["train", "train.global_batch_size=7"], "is not a multiple of"),
        (["train", "grid.tensor=64", "launch.processes=64"], "more tensor ranks than"),
        (["train", "--config-dir", "/no/such"], "no such folder"),
        (["train", "-m", "grid.tensr=1,2"], "nearest: grid.tensor"),
        (["train", "-m", "--cfg", "job"], "leave out -m"),
        (["prepare", "train.steps=3"], "prepare takes data.path"),
        (["prepare", "data.path=/no/such"], "no such file"),
    ],
)
def test_refusals(capsys, words, message):
    assert message in refused(capsys, *words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"caf\xe9" * 99, "byte 0xe9 at offset 3 is not UTF-8"),
        (b"short", "fewer than one sample"),
    ],
)
def test_data_is_looked_at_before_anything_starts(capsys, tmp_path, content, message):
    file = tmp_path / "a, b='c'.txt"
    file.write_bytes(content)
    error = refused(capsys, "train", f"data.path={file}")
    assert message in error and len(error.splitlines()) == 2


def test_a_truncated_index_is_refused(capsys, tmp_path):
    (tmp_path / "t.txt").write_text("x" * 5000)
    assert main(["prepare", f"data.path={tmp_path}/t.txt", f"data.directory={tmp_path}/d"]) == 0
    capsys.readouterr()
    (index,) = (tmp_path / "d").glob("*/tokens.idx")
    index.write_bytes(index.read_bytes()[:40])
    assert "truncated" in refused(capsys, "train", f"data.path={index}")


@pytest.mark.case(42)
def test_the_three_faults_in_a_process_of_its_own():
    wrong = ("+train.micro_batchsize=4", "grid.tenzor=2", "optimizer.lr=-1")
    result = command("train", "experiment=first_run", *wrong)
    assert result.returncode == 2 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 4 and all(word in result.stderr for word in wrong)
    assert "train.micro_batch_size" in lines[1] and "grid.tensor" in lines[2] and "at least 0" in lines[3]
    assert os.listdir(".") == []


# ---------------------------------------------------------------- what is right
def test_cfg_job_prints_what_can_be_read_back(capsys):
    assert main(["train", "experiment=first_run", "--cfg", "job", "train.steps=7"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (
        shown["train"]["steps"] == 7
        and shown["model"]["num_layers"] == 12
        and shown["choices"]["experiment"] == "first_run"
    )
    assert os.listdir(".") == []


def test_compose_or_exit_code_gives_the_plan(tmp_path):
    (tmp_path / "t.txt").write_text("x" * 5000)
    plan = compose_or_exit_code([f"data.path={tmp_path}/t.txt", "grid.tensor=2"], launched=4)
    assert not isinstance(plan, int) and plan.grid.tensor == 2
    assert list((tmp_path / "cache" / "gridtron").glob("prepared-*"))


def test_compose_or_exit_code_refuses(capsys):
    assert compose_or_exit_code(["grid.tensor=3"], launched=4) == 2
    assert "4 ranks" in capsys.readouterr().err
    assert compose_or_exit_code(["--help"]) == 0
