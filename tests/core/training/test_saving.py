"""What the loop saves, when it tells of it, and that a run which goes on is the run that was never stopped."""

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from toy_run import SAMPLES, Source, ToyEngine

from gridtron.core.checkpoint.layout import complete_checkpoints, step_path
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.core.checkpoint.saver import Saver
from gridtron.core.data.stream import EvaluationStream, TrainingStream
from gridtron.core.files import Files
from gridtron.core.grid import Grid
from gridtron.core.optim.config import LRScheduleConfig
from gridtron.core.optim.schedule import learning_rate
from gridtron.core.training.callbacks import BaseCallback, CallbackError, Callbacks
from gridtron.core.training.interruption import Interruption
from gridtron.core.training.loggers import JsonLinesLogger
from gridtron.core.training.loop import TrainingLoop
from gridtron.core.training.metrics import read_rows


class Average(BaseCallback):
    """State of every kind that JSON holds, from every moment of a step."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"loss": 0.0, "evaluations": [], "last": None}
        self.told: list[int] = []

    def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
        self.values["loss"] = 0.9 * self.values["loss"] + 0.1 * row["loss"]
        self.values["last"] = {"step": step, "odd": bool(step % 2)}

    def on_evaluate(self, step: int, row: Mapping[str, Any]) -> None:
        self.values["evaluations"].append([step, row["eval_loss"]])

    def on_save(self, step: int, path: str) -> None:
        assert Manifest.read(Path(path)).extra["progress"]["step"] == step, "told before it is complete"
        self.told.append(step)

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


TOTAL = 14
WSD = LRScheduleConfig(name="wsd", warmup_steps=3, decay_steps=6, min_ratio=0.1)


def make_loop(directory: Path, grid: Grid | None = None, batch: int = 4, **changes: Any) -> TrainingLoop:
    """Accumulation of two microbatches, evaluation, decay of the rate, callbacks with states."""
    grid = grid or Grid.layout(1)
    directory.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "engine": ToyEngine(grid),
        "data": TrainingStream(Source(3), 0, batch, 2, grid.data.rank, grid.data.size),
        "grid": grid,
        "directory": directory,
        "learning_rate": lambda step: learning_rate(step, WSD, 0.05, TOTAL),
        "total_steps": TOTAL,
        "evaluation": EvaluationStream(Source(3), 4, 2, 2, grid.data.rank, grid.data.size),
        "evaluate_every": 3,
        "callbacks": Callbacks([Average(), Average()]),
        "loggers": [JsonLinesLogger(directory / "metrics.jsonl")] if grid.rank == 0 else [],
    }
    return TrainingLoop(**options | changes)


def rows_of(directory: Path) -> list[dict[str, Any]]:
    timed = {"tokens_per_second", "step_seconds", "memory_bytes", "mfu"}
    rows = read_rows(directory / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stop", range(1, TOTAL))
def test_stopped_between_any_two_steps(stop: int, asynchronous: bool, tmp_path: Path) -> None:
    whole = make_loop(tmp_path / "whole")
    whole.run()
    saver = Saver(Grid.layout(1), asynchronous)
    make_loop(tmp_path / "parts", stop_after=stop, saver=saver).run()
    again = make_loop(tmp_path / "parts")
    again.resume(step_path(again.checkpoints, stop))
    assert again.run() == whole.progress
    assert torch.equal(again.engine.weight, whole.engine.weight)  # type: ignore[attr-defined]
    assert torch.equal(again.engine.momentum, whole.engine.momentum)  # type: ignore[attr-defined]
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    for one, other in zip(again.callbacks.callbacks, whole.callbacks.callbacks, strict=True):
        assert one.state_dict() == other.state_dict()


class Recorded(TrainingStream):
    """Remembers the samples of every step."""

    read: list[list[int]]

    def microbatches(self, position: int) -> Any:
        self.read = [*getattr(self, "read", []), self.sample_ids(position).tolist()]
        return super().microbatches(position)


@pytest.mark.case(33)
@pytest.mark.parametrize("after", [2, 8, 10])
def test_another_batch_size_goes_on_at_the_right_sample(after: int, tmp_path: Path) -> None:
    """Steps of four samples and then of ``after``: every sample of the epoch once, in the order of the epoch; what does
    not fill a last batch is dropped, as in any run."""
    first = Recorded(Source(3), 0, 4, 2)
    make_loop(tmp_path, data=first, stop_after=5).run()
    second = Recorded(Source(3), 0, after, 2)
    steps = min((SAMPLES - 20) // after, TOTAL - 5)
    again = make_loop(tmp_path, data=second, stop_after=5 + steps)
    again.resume(step_path(again.checkpoints, 5))
    progress = again.run()
    seen = np.concatenate([np.concatenate(stream.read) for stream in (first, second)])
    order = np.concatenate(
        [TrainingStream(Source(3), 0, 4, 2).sample_ids(position) for position in range(0, SAMPLES, 4)]
    )
    assert seen.tolist() == order[: len(seen)].tolist()
    assert len(set(seen.tolist())) == len(seen) == 20 + steps * after
    next_epoch = SAMPLES - len(seen) < after
    assert (progress.position, progress.tokens) == (SAMPLES if next_epoch else len(seen), 3 * len(seen))


class SlowFiles(Files):
    """Every file takes its time to reach the disk."""

    def sync(self, file: Any) -> None:
        time.sleep(0.15)
        super().sync(file)


def save_behind(folder: str) -> list[Any]:
    with Grid.create(data=2) as grid:
        saver = Saver(grid, asynchronous=True, files=SlowFiles() if grid.rank == 1 else Files())
        callback = Average()
        seen = []

        class Watch(BaseCallback):
            def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
                seen.append((step, list(callback.told)))
                time.sleep(0.05)

        loop = make_loop(
            Path(folder), grid, saver=saver, save_every=4, evaluate_every=0, callbacks=Callbacks([callback, Watch()])
        )
        loop.run()
        return [seen, callback.told]


@pytest.mark.case(32)
def test_told_at_the_same_step_by_all_and_never_early(tmp_path: Path) -> None:
    first, second = run_ranks(save_behind, 2, str(tmp_path))
    assert first == second, "ranks heard of a checkpoint at different steps"
    seen, told = first
    assert told == [4, 8, 12, 14]
    known = dict(seen)
    assert known[5] == [], "told at once, while a rank was still writing"
    assert 4 in known[12]


def stop_by_one(folder: str, when: int, asynchronous: bool) -> tuple[int, Any, int, list[int]]:
    """Rank 1 alone is asked to stop, in the middle of a step."""
    with Grid.create(data=2) as grid:
        interruption = Interruption()

        class Asked(BaseCallback):
            def on_step_start(self, step: int) -> None:
                if step == when and grid.rank == 1:
                    interruption.asked = signal.SIGUSR1

        callback = Average()
        saver = Saver(grid, asynchronous)
        loop = make_loop(
            Path(folder), grid, saver=saver, interruption=interruption, callbacks=Callbacks([Asked(), callback])
        )
        progress = loop.run()
        return progress.step, loop.stopped_by, int(loop.engine.steps), callback.told  # type: ignore[attr-defined]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("when", [1, 5, TOTAL])
def test_all_ranks_stop_where_one_was_asked(when: int, asynchronous: bool, tmp_path: Path) -> None:
    results = run_ranks(stop_by_one, 2, str(tmp_path), when, asynchronous)
    finished = when == TOTAL
    assert results == [(when, None if finished else signal.SIGUSR1, when, [when])] * 2
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == [f"step-{when:08d}"]


def test_asked_before_the_first_step_nothing_is_done(tmp_path: Path) -> None:
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        loop = make_loop(tmp_path, interruption=interruption)
        assert loop.run().step == 0
    assert loop.stopped_by == signal.SIGTERM
    assert not (tmp_path / "checkpoints").exists() and read_rows(tmp_path / "metrics.jsonl") == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL == signal.getsignal(signal.SIGUSR1)


def test_a_state_that_json_cannot_hold_is_told_by_name(tmp_path: Path) -> None:
    class Holds(BaseCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"tensor": torch.ones(3)}

    with pytest.raises(CallbackError, match=r"Holds failed in state_dict: .*not JSON serializable"):
        make_loop(tmp_path, callbacks=Callbacks([Holds()])).run()
    assert not complete_checkpoints(tmp_path / "checkpoints")


def test_a_save_behind_a_run_that_fails_still_ends(tmp_path: Path) -> None:
    class Fails(BaseCallback):
        def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
            if step == 5:
                raise KeyError("planted")

    saver = Saver(Grid.layout(1), asynchronous=True, files=SlowFiles())
    with pytest.raises(CallbackError, match="planted"):
        make_loop(tmp_path, saver=saver, save_every=4, callbacks=Callbacks([Fails()])).run()
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-00000004"]


def test_a_checkpoint_says_where_it_comes_from(tmp_path: Path) -> None:
    make_loop(tmp_path, described={"plan": {"model": {"hidden_size": 7}}}, stop_after=4).run()
    extra = json.loads((step_path(tmp_path / "checkpoints", 4) / "manifest.json").read_text())["extra"]
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert extra["plan"] == {"model": {"hidden_size": 7}}
    assert extra["metrics"] == {"loss": rows[-1]["loss"], "eval_loss": rows[-2]["eval_loss"]}
    assert extra["progress"] == {"step": 4, "position": 16, "tokens": 48}
