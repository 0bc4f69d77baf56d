"""Runs of the toy as commands of their own, in a session of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import toy_run
from toy_run import SMALL, rows

TOY = str(Path(toy_run.__file__).resolve())


def start(tmp_path: Path, *overrides: str, prefix: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    command = [*(prefix or (sys.executable,)), TOY, *SMALL, f"run.directory={tmp_path / 'run'}", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def wait_for_steps(tmp_path: Path, count: int, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while len(rows(tmp_path)) < count:
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)


def torchrun(processes: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
