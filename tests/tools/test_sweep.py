"""Sweeps: every job in a clean process and a folder of its own, and one that fails does not keep the others."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from gridtron.tools.arguments import parse_arguments
from gridtron.tools.sweep import run_sweep

# Stands for ``gridtron train``: writes what it was given, and fails for seed 1.
JOB = """
import json, os, sys
folder = next(word.partition("=")[2] for word in sys.argv if word.startswith("run.directory="))
facts = {"arguments": sys.argv[1:], "pid": os.getpid(), "here": os.getcwd(), "environment": sorted(os.environ)}
open(os.path.join(folder, "facts.json"), "w").write(json.dumps(facts))
sys.exit(3 if "train.seed=1" in sys.argv else 0)
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)

    def run(*words):
        return run_sweep(parse_arguments(["-m", *words]), [sys.executable, str(tmp_path / "job.py")])

    return run


def facts(folder):
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.case(14)
def test_jobs_are_clean_and_apart(sweep, tmp_path):
    before = dict(os.environ)
    assert sweep("experiment=first_run", "train.seed=2,3", "grid.tensor=1,2", "run.directory=all of it") == 0
    jobs = [facts(tmp_path / "all of it" / str(number)) for number in range(4)]
    assert sorted(os.listdir(tmp_path)) == ["all of it", "job.py"]
    assert sorted(os.listdir(tmp_path / "all of it")) == ["0", "1", "2", "3"]
    assert len({job["pid"] for job in jobs} | {os.getpid()}) == 5
    assert [job["arguments"][:3] for job in jobs] == [
        ["experiment=first_run", f"train.seed={seed}", f"grid.tensor={tensor}"] for seed in (2, 3) for tensor in (1, 2)
    ]
    assert all(job["here"] == str(tmp_path) for job in jobs)
    assert jobs[0]["environment"] == jobs[3]["environment"] and dict(os.environ) == before


@pytest.mark.case(14)
def test_a_failing_job_does_not_spoil_the_next(sweep, tmp_path, capfd):
    assert sweep("train.seed=1,2", "run.directory=out") == 1
    assert facts(tmp_path / "out" / "1")["arguments"][0] == "train.seed=2"
    assert not (tmp_path / "out" / "2").exists()
    printed = capfd.readouterr().err
    assert "job 0: failed with exit code 3: train.seed=1" in printed and "job 1: done: train.seed=2" in printed
    assert "Traceback" not in printed


def test_words_come_through_as_typed(sweep, tmp_path):
    given = (
        "+train.steps=5", "data.path='/a, b/c=d.txt'", "optimizer.betas=[0.8,0.9]", "model=llama31_8b,tiny",
        "model.rope_scaling={type: linear, factor: 2}", "run.directory=out",
    )  # fmt: skip
    assert sweep(*given) == 0
    from gridtron.conf.compose import check_request

    for number, model in enumerate(("llama31_8b", "tiny")):
        words = facts(tmp_path / "out" / str(number))["arguments"][:-1]
        request = check_request(words)
        assert request.checked.violations == [] and request.checked.groups == {"model": model}
        values = request.compose()
        assert values["train"]["steps"] == 5 and values["data"]["path"] == "/a, b/c=d.txt"
        assert values["optimizer"]["betas"] == [0.8, 0.9] and values["model"]["rope_scaling"] == {
            "type": "linear",
            "factor": 2,
        }


def test_folders_of_option_files_are_handed_on(sweep, tmp_path):
    (tmp_path / "other" / "model").mkdir(parents=True)
    (tmp_path / "other" / "model" / "mine.yaml").write_text("num_layers: 3\n")
    assert sweep("--config-dir", str(tmp_path / "other"), "model=mine,tiny", "run.directory=out") == 0
    assert facts(tmp_path / "out" / "0")["arguments"][:3] == ["--config-dir", str(tmp_path / "other"), "model=mine"]


def test_default_folder_is_under_runs(sweep, tmp_path):
    assert sweep("train.seed=2,3") == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-sweep") and sorted(os.listdir(folder)) == ["0", "1"]


@pytest.mark.parametrize(
    "words", [("train.sed=1,2",), ("optimizer.lr=1,-1",), ("model=tiny,tinny",), ("hydra/launcher=none",)]
)
def test_wrong_requests_start_nothing(sweep, tmp_path, words, capsys):
    assert sweep(*words, "run.directory=out") == 2
    assert not (tmp_path / "out" / "0").exists() and "Traceback" not in capsys.readouterr().err


def test_a_sweep_under_a_launcher_is_refused(sweep, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert sweep("train.seed=2,3") == 2
    assert "on every rank" in capsys.readouterr().err


DRIVER = """
import sys
from gridtron.tools.arguments import parse_arguments
from gridtron.tools.sweep import run_sweep
sys.exit(run_sweep(parse_arguments(["-m", "train.seed=1,2", "run.directory=out"]), [sys.executable, "slow.py"]))
"""
SLOW = """
import os, sys, time
folder = next(word.partition("=")[2] for word in sys.argv if word.startswith("run.directory="))
open(os.path.join(folder, "pid"), "w").write(f"{os.getpid()}\\n")
time.sleep(60)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("number", "saves", "code", "told"),
    [
        (signal.SIGINT, False, 130, "the sweep was interrupted"),
        (signal.SIGTERM, False, 143, "the sweep was stopped by SIGTERM; the same command, with run.directory="),
        (signal.SIGUSR1, True, 77, "the sweep was stopped by SIGUSR1; the same command, with run.directory="),
    ],
)
def test_an_interrupted_sweep_leaves_no_job(tmp_path, number, saves, code, told):
    (tmp_path / "driver.py").write_text(DRIVER)
    saving = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(77))\n"
    (tmp_path / "slow.py").write_text((saving if saves else "") + SLOW)
    driver = subprocess.Popen(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in a shell's background, Ctrl-C is ignored by all that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    note = tmp_path / "out" / "0" / "pid"
    deadline = time.monotonic() + 30
    while not (note.exists() and note.read_text().endswith("\n")):
        assert time.monotonic() < deadline and driver.poll() is None
        time.sleep(0.05)
    driver.send_signal(number)
    _, error = driver.communicate(timeout=30)
    assert driver.returncode == code and told in error
    assert not psutil.pid_exists(int(note.read_text())) and not (tmp_path / "out" / "1").exists()


def test_a_killed_sweep_leaves_no_job(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "slow.py").write_text(SLOW)
    driver = subprocess.Popen([sys.executable, "driver.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    note = tmp_path / "out" / "0" / "pid"
    deadline = time.monotonic() + 30
    while not (note.exists() and note.read_text().endswith("\n")):
        assert time.monotonic() < deadline and driver.poll() is None
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    while psutil.pid_exists(int(note.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.case(14)
def test_two_real_runs_over_two_ranks(tmp_path):
    (tmp_path / "t.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    words = (
        "model=tiny", "model.num_layers=1", "train.steps=2", "train.sequence_length=16", "train.global_batch_size=4",
        "grid.data=2", f"data.path={tmp_path}/t.txt", f"data.directory={tmp_path}/cache", "logging.tensorboard=false",
    )  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "gridtron",
        "train",
        "-m",
        "train.seed=1,2",
        *words,
        f"run.directory={tmp_path}/out",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = []
    for number in ("0", "1"):
        rows = (tmp_path / "out" / number / "metrics.jsonl").read_text().splitlines()
        assert len(rows) == 2
        losses.append(json.loads(rows[-1])["loss"])
    assert losses[0] != losses[1] and sorted(os.listdir(tmp_path / "out")) == ["0", "1"]
