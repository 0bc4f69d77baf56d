"""SIGKILL while a run saves: no checkpoint that was complete is lost, and the run goes on as the one never killed."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from toy_jobs import start
from toy_run import losses

from gridtron.core.checkpoint.find import newest_checkpoint
from gridtron.core.checkpoint.layout import complete_checkpoints, step_of, unfinished_checkpoints
from gridtron.core.checkpoint.stored import Stored

pytestmark = pytest.mark.usefixtures("toy")

WIDE = "300000"
"""Weights: a save takes about as long as a step."""


def sound(path: Path) -> int:
    """The step of a checkpoint whose every byte is what was written."""
    stored = Stored(path)
    for name in stored.names():
        assert stored.tensor(name).isfinite().all()
    return step_of(path) or 0


def kill_while_saving(tmp_path: Path, random_: random.Random, *overrides: str) -> bool:
    """Starts the run, kills it in or between saves; whether a save was under way."""
    root = tmp_path / "run" / "checkpoints"
    before = [sound(path) for path in complete_checkpoints(root)]
    job = start(tmp_path, "train.steps=4000", "grid.tensor=2", "checkpoint.every=1", *overrides, TOY_WIDTH=WIDE)
    aim = (before[-1] if before else 0) + random_.randint(1, 4)
    deadline = time.monotonic() + 60
    while not [path for path in complete_checkpoints(root) if (step_of(path) or 0) >= aim]:
        assert time.monotonic() < deadline and job.poll() is None, job.communicate()
        time.sleep(0.001)
    if random_.random() < 0.6:
        while not unfinished_checkpoints(root) and job.poll() is None:
            pass
    time.sleep(random_.random() * 0.03)
    complete = [step_of(path) or 0 for path in complete_checkpoints(root)]
    os.kill(job.pid, signal.SIGKILL)
    job.communicate(timeout=30)
    time.sleep(0.2)  # ranks end with their parent
    interrupted = bool(unfinished_checkpoints(root))
    after = [sound(path) for path in complete_checkpoints(root)]
    assert set(complete) <= set(after), "a complete checkpoint was lost"
    found = newest_checkpoint(root)
    assert found.path is not None and step_of(found.path) == after[-1] and not found.damaged
    assert len(found.skipped) <= 1
    return interrupted


def kill_and_go_on(times: int, seed: int, train: Any, tmp_path: Path, *overrides: str) -> int:
    random_ = random.Random(seed)
    interrupted = sum(kill_while_saving(tmp_path, random_, *overrides) for _ in range(times))
    last = (step_of(complete_checkpoints(tmp_path / "run" / "checkpoints")[-1]) or 0) + 3
    code, printed = train(f"train.stop_after={last}", small=False)
    assert code == 0 and "goes on from" in printed, printed
    code, printed = train(
        "train.steps=4000", "grid.tensor=2", f"train.stop_after={last}", directory=str(tmp_path / "unbroken")
    )
    assert code == 0, printed
    assert losses(tmp_path) == losses(tmp_path, "unbroken")
    return interrupted


@pytest.mark.case(32)
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed(times: int, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_WIDTH", WIDE)
    kill_and_go_on(times, 5, train, tmp_path, "checkpoint.asynchronous=true")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_fifty_times(asynchronous: str, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_WIDTH", WIDE)
    interrupted = kill_and_go_on(50, 7, train, tmp_path, f"checkpoint.asynchronous={asynchronous}")
    assert interrupted >= 10, "the kills came between the saves"
