"""Local processes: the first failure is told once, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from gridtron.core.errors import JobError
from gridtron.core.grid import Grid
from gridtron.core.launch import Launcher
from gridtron.core.supervise import run_local

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def describe(rank: int) -> str:
    return f"tensor {rank}"


def all_reduce(launcher: Launcher) -> int:
    import torch
    import torch.distributed as dist

    with Grid.create(launcher=launcher) as grid:
        value = torch.tensor(float(grid.rank + 1))
        dist.all_reduce(value)
        return 0 if value.item() == launcher.world_size * (launcher.world_size + 1) / 2 else 3


def fail(launcher: Launcher, how: str) -> None:
    """Rank 1 fails by ``how`` at its second step while the others wait for it in a collective."""
    import torch
    import torch.distributed as dist

    Grid.create(launcher=launcher)
    for step in (1, 2):
        if launcher.rank == 1 and step == 2:
            if how == "raise":
                raise KeyError("the reason")
            if how == "job error":
                raise JobError("the disk is full")
            if how == "agreed":
                raise JobError("all say so", agreed=True)
            if how == "exit":
                os._exit(7)
            if how == "silent":
                os._exit(1)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def test_ranks_meet_and_the_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_local(all_reduce, 3, threads=1) == 0
    assert list(tmp_path.iterdir()) == []


def test_spawned_ranks_meet() -> None:
    assert run_local(all_reduce, 2, threads=1, method="spawn") == 0


@pytest.mark.case(15)
@pytest.mark.parametrize("processes", [2, 4])
def test_first_traceback_once_with_its_place(processes: int, capfd: pytest.CaptureFixture[str]) -> None:
    began, before = time.monotonic(), psutil.Process().children()
    assert run_local(fail, processes, ("raise",), describe, threads=1) == 1
    assert time.monotonic() - began < 30
    printed = capfd.readouterr().err
    assert printed.count("Traceback (most recent call last)") == 1
    assert printed.startswith(f"rank 1 of {processes} (tensor 1) failed:\nTraceback")
    assert "KeyError: 'the reason'" in printed
    assert psutil.Process().children() == before


@pytest.mark.case(15)
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("job error", 1, "rank 1 of 2 (tensor 1): the disk is full\n"),
        ("agreed", 1, "all say so\n"),
        ("exit", 7, "rank 1 of 2 (tensor 1) ended with exit code 7 and without a traceback\n"),
        ("silent", 1, "rank 1 of 2 (tensor 1) ended with exit code 1 and without a traceback\n"),
        ("kill", 1, "rank 1 of 2 (tensor 1) was ended by SIGKILL; out of memory? The kernel's log (dmesg) tells\n"),
    ],
)
def test_ways_to_fail(how: str, code: int, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = psutil.Process().children()
    assert run_local(fail, 2, (how,), describe, threads=1) == code
    assert capfd.readouterr().err == message
    assert psutil.Process().children() == before


def stubborn(launcher: Launcher) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if launcher.rank == 0:
        time.sleep(0.3)
        raise ValueError("over")
    time.sleep(60)


def test_a_rank_that_ignores_sigterm_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert run_local(stubborn, 2, threads=1) == 1
    assert 2 < time.monotonic() - began < 30
    assert "ValueError: over" in capfd.readouterr().err


JOB = """
    import os, sys, time
    import torch, torch.distributed as dist
    from gridtron.core.grid import Grid
    from gridtron.core.supervise import run_local

    def wait_forever(launcher, folder):
        Grid.create(launcher=launcher)
        open(f"{folder}/{os.getpid()}", "w").close()
        if launcher.rank == 0:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))

    if __name__ == "__main__":
        sys.exit(run_local(wait_forever, 2, (sys.argv[1],), threads=1, method=sys.argv[2]))
"""


def start_job(folder: Path, method: str = "fork") -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    script = folder / "job.py"
    script.write_text(textwrap.dedent(JOB))
    ranks = folder / "ranks"
    ranks.mkdir()
    job = subprocess.Popen(
        [sys.executable, str(script), str(ranks), method],
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(list(ranks.iterdir())) < 2:
        assert time.monotonic() < deadline, "the ranks did not start"
        assert job.poll() is None, job.stderr.read() if job.stderr else ""
        time.sleep(0.05)
    return job, [psutil.Process(int(entry.name)) for entry in ranks.iterdir()]


def assert_gone(ranks: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert alive == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("signals", "to_group", "code"),
    [
        ([signal.SIGINT], True, 130),
        ([signal.SIGINT, signal.SIGINT], True, 130),
        ([signal.SIGTERM], False, 143),
        ([signal.SIGKILL], False, -signal.SIGKILL),
    ],
)
def test_no_orphans(signals: list[signal.Signals], to_group: bool, code: int, tmp_path: Path) -> None:
    job, ranks = start_job(tmp_path)
    began = time.monotonic()
    for number in signals:
        # A terminal sends Ctrl-C to every process of the group, a batch system SIGTERM to the one it started.
        os.killpg(job.pid, number) if to_group else os.kill(job.pid, number)
        time.sleep(0.05)
    _, printed = job.communicate(timeout=30)
    assert job.returncode == code
    assert time.monotonic() - began < 30
    assert_gone(ranks)
    assert "Traceback" not in printed
    if code == 130:
        assert printed == "interrupted\n"


@pytest.mark.slow
def test_no_orphans_of_a_killed_parent_under_spawn(tmp_path: Path) -> None:
    job, ranks = start_job(tmp_path, "spawn")
    job.kill()
    job.wait(30)
    assert_gone(ranks)


def show_what_was_inherited(launcher: Launcher) -> int:
    import sys

    import torch

    launched_with = sys.modules["gridtron.core.supervise"]
    return 0 if getattr(launched_with, "mark_of_the_test", None) == os.getppid() and torch.get_num_threads() == 1 else 9


def test_ranks_on_the_cpu_are_forked_with_torch_already_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would pay the import of torch again otherwise; how long a start takes is measured elsewhere."""
    import gridtron.core.supervise

    monkeypatch.setattr(gridtron.core.supervise, "mark_of_the_test", os.getpid(), raising=False)
    assert run_local(show_what_was_inherited, 2, threads=1) == 0
    assert run_local(show_what_was_inherited, 2, threads=1, method="spawn") == 9
