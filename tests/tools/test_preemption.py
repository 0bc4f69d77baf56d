"""A scheduler's signals: the run saves at a step that all ranks agree on, ends as asked, and goes on."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_jobs import start, torchrun, wait_for_steps
from toy_run import losses, rows

from gridtron.core.checkpoint.layout import complete_checkpoints, step_of

pytestmark = pytest.mark.usefixtures("toy")

LONG = ("train.steps=400", "lr_schedule=wsd", "lr_schedule.decay_steps=380", "evaluation.every=5", "checkpoint.every=7")


def ended(job: Any, tmp_path: Path, code: int = 0, name: str = "SIGTERM") -> int:
    """The step at which a job stopped by a signal says that it stopped; its checkpoint and its rows end there."""
    out, printed = job.communicate(timeout=60)
    assert job.returncode == code, (out, printed)
    assert "Traceback" not in printed
    told = re.findall(rf"stopped by {name} after step (\d+) of 400; saved: the same command with", printed)
    assert len(told) == 1, printed
    step = int(told[0])
    assert step_of(complete_checkpoints(tmp_path / "run" / "checkpoints")[-1]) == step
    assert len(rows(tmp_path)) == step
    return step


def goes_on(step: int, train: Any, tmp_path: Path, grid: str = "grid.tensor=2") -> None:
    """The rest of the run is that of a run which was never stopped, to the bit."""
    last = step + 6
    code, printed = train(f"train.stop_after={last}", small=False)
    assert code == 0, printed
    assert train(*LONG, grid, f"train.stop_after={last}", directory=str(tmp_path / "unbroken"))[0] == 0
    assert losses(tmp_path) == losses(tmp_path, "unbroken")
    assert [step for step, _ in losses(tmp_path)] == list(range(1, last + 1))


@pytest.mark.parametrize(
    ("number", "whom", "code", "overrides"),
    [
        (
            signal.SIGUSR1,
            "a rank",
            75,
            ("launch.preempted_exit=75", "checkpoint.asynchronous=true", "checkpoint.keep=2"),
        ),
        pytest.param(signal.SIGTERM, "parent", 0, ("checkpoint.asynchronous=true",), marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "parent", 0, (), marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "group", 0, ("checkpoint.asynchronous=true",), marks=pytest.mark.slow),
    ],
)
def test_saves_and_ends(number: Any, whom: str, code: int, overrides: Any, train: Any, tmp_path: Path) -> None:
    job = start(tmp_path, *LONG, "grid.tensor=2", *overrides, TOY_DELAY="0.03")
    wait_for_steps(tmp_path, 3, job)
    ranks = psutil.Process(job.pid).children(recursive=True)
    if whom == "a rank":
        ranks[-1].send_signal(number)
    else:
        os.killpg(job.pid, number) if whom == "group" else os.kill(job.pid, number)
    step = ended(job, tmp_path, code, number.name)
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    goes_on(step, train, tmp_path)


@pytest.mark.slow
def test_one_process(train: Any, tmp_path: Path) -> None:
    job = start(tmp_path, *LONG, "launch.preempted_exit=3", TOY_DELAY="0.03")
    wait_for_steps(tmp_path, 2, job)
    job.send_signal(signal.SIGUSR1)
    job.send_signal(signal.SIGTERM)
    step = ended(job, tmp_path, 3, "SIG(?:USR1|TERM)")
    goes_on(step, train, tmp_path, "grid.tensor=1")


@pytest.mark.slow
def test_under_torchrun(train: Any, tmp_path: Path) -> None:
    job = start(tmp_path, *LONG, "grid.tensor=2", prefix=torchrun(2), TOY_DELAY="0.03")
    wait_for_steps(tmp_path, 2, job)
    for rank in psutil.Process(job.pid).children(recursive=True):
        if "toy_run.py" in " ".join(rank.cmdline()):
            rank.send_signal(signal.SIGUSR1)
            break
    step = ended(job, tmp_path, 0, "SIGUSR1")
    goes_on(step, train, tmp_path)


@pytest.mark.slow
def test_a_finished_run_is_finished_whatever_came_at_its_last_step(train: Any, tmp_path: Path) -> None:
    job = start(tmp_path, "train.steps=3", "launch.preempted_exit=9", "grid.tensor=2", TOY_DELAY="1.0")
    wait_for_steps(tmp_path, 2, job)
    job.send_signal(signal.SIGTERM)
    _, printed = job.communicate(timeout=30)
    assert job.returncode == 0, printed
    assert "done: 3 steps" in printed


@pytest.mark.slow
def test_a_second_sigterm_ends_a_job_that_does_not_come_to_its_next_step(train: Any, tmp_path: Path) -> None:
    job = start(tmp_path, "grid.tensor=2", TOY_DELAY="30")
    ranks: list[psutil.Process] = []
    while len(ranks) < 2 or len(list((tmp_path / "run").glob("stacks/*"))) < 2:
        assert job.poll() is None, job.communicate()
        ranks = psutil.Process(job.pid).children(recursive=True)
        time.sleep(0.5)
    for _ in range(2):
        job.send_signal(signal.SIGTERM)
        psutil.wait_procs(ranks, timeout=0.5)
    _, printed = job.communicate(timeout=20)
    assert job.returncode == 128 + signal.SIGTERM
    assert printed.splitlines()[-1] == "ended by SIGTERM"
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
