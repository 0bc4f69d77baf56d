"""``gridtron train`` when ranks fail, disks are full, and other launchers start it."""

import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_jobs import TOY, start, torchrun, wait_for_steps
from toy_run import SMALL, rows

from gridtron.core.training.metrics import read_rows
from gridtron.tools.train import main

pytestmark = pytest.mark.usefixtures("toy")


# -------------------------------------------------------------------- failing ranks
@pytest.mark.case(15)
@pytest.mark.parametrize("where", ["step:1:2", "data:1:3", "save:1:6", "assemble:1:0"])
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_traceback_with_its_place(
    where: str, processes: int, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_FAULT", where)
    began = time.monotonic()
    code, printed = train(f"grid.data={processes}", "train.micro_batch_size=1")
    assert code == 1
    assert time.monotonic() - began < 30
    assert f"rank 1 of {processes} (data 1) failed:\nTraceback" in printed
    assert printed.count("Traceback (most recent call last)") == 1
    assert f"KeyError: 'planted in {where.split(':')[0]}'" in printed


@pytest.mark.parametrize(("how", "message", "code"), [("kill", "ended by SIGKILL", 1), ("exit", "exit code 5", 5)])
def test_a_rank_that_vanishes(how: str, message: str, code: int, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAULT", f"step:1:2:{how}")
    found, printed = train("grid.data=2")
    assert found == code
    assert "rank 1 of 2 (data 1)" in printed
    assert message in printed


@pytest.mark.case(15)
def test_a_wrong_configuration_ends_before_any_process(train: Any, tmp_path: Path) -> None:
    code, printed = train("grid.data=3")
    assert code == 2
    assert "global_batch_size=4" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("width", "named"), [("3000", "the checkpoint step-00000010"), ("7", "metrics.jsonl")])
def test_a_full_disk_ends_in_a_message_and_the_run_goes_on(
    width: str, named: str, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may grow over 6,000 bytes: a wide model's checkpoint reaches that, or the rows of many steps."""
    monkeypatch.setenv("TOY_WIDTH", width)
    common = ("grid.tensor=2", "train.steps=40", "checkpoint.every=10")
    assert train(*common, "train.stop_after=2")[0] == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        code, printed = train(*common)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    for expected in (named, "File too large", "Make room"):
        assert expected in printed
    assert "Traceback" not in printed
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before
    assert not list(checkpoint.parent.glob(".*"))
    code, printed = train(*common)
    assert code == 0, printed
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 41))


# -------------------------------------------------------------------- as a command of its own
def test_ctrl_c_leaves_no_process_and_a_run_that_goes_on(tmp_path: Path, train: Any) -> None:
    job = start(tmp_path, "grid.tensor=2", "train.steps=500", "checkpoint.every=2", TOY_DELAY="0.05")
    wait_for_steps(tmp_path, 4, job)
    ranks = psutil.Process(job.pid).children(recursive=True)
    assert len(ranks) >= 2
    os.killpg(job.pid, signal.SIGINT)
    _, printed = job.communicate(timeout=20)
    assert job.returncode == 130
    assert printed.splitlines()[-1] == "interrupted"
    assert "Traceback" not in printed
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    done = len(rows(tmp_path))
    code, printed = train("train.stop_after=30", small=False)
    assert code == 0, printed
    assert "goes on from" in printed
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 31))
    assert done < 30


@pytest.mark.slow
@pytest.mark.case(16)
def test_ranks_that_start_apart_share_one_folder(train: Any, tmp_path: Path) -> None:
    command = [*torchrun(2), TOY, *SMALL, "grid.tensor=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOY_LATE": "1.2"}
    job = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=100)
    assert job.returncode == 0, job.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(read_rows(folder / "metrics.jsonl")) == 6
    names = sorted(path.name for path in (folder / "checkpoints" / "step-00000006").iterdir())
    assert names == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    # And it is found whole again, by one process.
    code, printed = train(
        "train.steps=7", "checkpoint.allow_changes=true", "grid.tensor=1", small=False, directory=str(folder)
    )
    assert code == 0, printed
    assert len(read_rows(folder / "metrics.jsonl")) == 7


def start_ranks(
    tmp_path: Path, count: int, port: int, *overrides: str, **variables: str
) -> list[subprocess.Popen[str]]:
    """Ranks as srun starts them: all at once, nobody watches."""
    shared = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        start(tmp_path, *overrides, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **shared, **variables)
        for rank in range(count)
    ]


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.case(16)
def test_a_refusal_ends_every_rank_and_is_said_once(tmp_path: Path) -> None:
    jobs = start_ranks(tmp_path, 2, free_port(), "grid.tensor=2", "optimizer.lr=-1")
    printed = [job.communicate(timeout=60) for job in jobs]
    assert [job.returncode for job in jobs] == [2, 2]
    assert printed[0][1].count("optimizer.lr=-1") == 1
    assert printed[1] == ("", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.case(15)
def test_a_failing_rank_of_an_outer_launcher_does_not_wait_for_its_peers(tmp_path: Path) -> None:
    began = time.monotonic()
    jobs = start_ranks(tmp_path, 2, free_port(), "grid.data=2", TOY_FAULT="step:1:2")
    printed = [job.communicate(timeout=60) for job in jobs]
    assert time.monotonic() - began < 30
    assert [job.returncode for job in jobs] == [1, 1]
    assert printed[1][1].startswith("rank 1 of 2 (data 1) failed:\nTraceback")
    assert "KeyError: 'planted in step'" in printed[1][1]


def test_incomplete_variables_of_a_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main([*SMALL]) == 2
    assert "WORLD_SIZE is not set" in capfd.readouterr().err
