"""Fixtures of runs around the toy model of ``toy_run``."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import toy_run

from gridtron.tools.train import main


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The toy in place of the assembled run, an empty working directory, no launcher, one thread."""
    monkeypatch.setitem(sys.modules, "gridtron.tools.assemble", toy_run.module())
    # Preparing the standard library's source is another part's.
    monkeypatch.setattr("gridtron.tools.arguments.check_data", lambda plan: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def train(toy: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command into ``tmp_path/run``; returns its exit code and what it said."""

    def run(*overrides: str, small: bool = True, directory: str | None = None) -> tuple[int, str]:
        folder = directory or str(tmp_path / "run")
        code = main([*(toy_run.SMALL if small else ()), f"run.directory={folder}", *overrides])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return run
