"""The loop around an engine: rows, evaluation, checkpoints, callbacks."""

import dataclasses
import faulthandler
import gc
import json
import math
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import edit_manifest
from toy_run import Source, ToyEngine

from gridtron.core.checkpoint.layout import CheckpointError, complete_checkpoints, step_path
from gridtron.core.data.batch import IGNORE_INDEX, Batch
from gridtron.core.data.stream import EvaluationStream, TrainingStream
from gridtron.core.errors import JobError
from gridtron.core.grid import Grid
from gridtron.core.precision import LossScaler
from gridtron.core.training.callbacks import (
    BaseCallback,
    CallbackError,
    Callbacks,
    GarbageCollection,
    ProfilerWindow,
    StackDump,
    StopOnNonFinite,
)
from gridtron.core.training.loggers import JsonLinesLogger
from gridtron.core.training.loop import TrainingLoop
from gridtron.core.training.metrics import Work, cut_rows, format_row, read_rows, training_row
from gridtron.core.training.protocols import LossSum, RunInfo, StepOutcome


def make_loop(directory: Path, **changes: Any) -> TrainingLoop:
    grid = Grid.layout(1)
    source = Source(3)
    options: dict[str, Any] = {
        "engine": ToyEngine(grid),
        "data": TrainingStream(source, 0, 4, 2),
        "grid": grid,
        "directory": directory,
        "learning_rate": lambda step: 0.01 / step,
        "total_steps": 6,
        "loggers": [JsonLinesLogger(directory / "metrics.jsonl")],
        "work": Work(10.0, 1e6, 1),
    }
    return TrainingLoop(**options | changes)


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = {"tokens_per_second", "step_seconds", "memory_bytes", "mfu"}
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


def test_rows_say_what_the_contract_says(tmp_path: Path) -> None:
    loop = make_loop(tmp_path, evaluation=EvaluationStream(Source(3), 4, 2, 2), evaluate_every=4)
    loop.run()
    rows = read_rows(tmp_path / "metrics.jsonl")
    steps = [row for row in rows if "grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert list(steps[0]) == [
        *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "memory_bytes", "mfu")
    ]
    assert [row["tokens"] for row in steps] == [12 * step for step in range(1, 7)]
    assert steps[1]["lr"] == 0.005
    for row in steps:
        assert row["tokens_per_second"] == pytest.approx(12 / row["step_seconds"])
        assert row["mfu"] == pytest.approx(10.0 * 12 / row["step_seconds"] / 1e6)
        assert row["memory_bytes"] > 10_000_000
    evaluations = [row for row in rows if "eval_loss" in row]
    assert [(row["step"], row["eval_tokens"]) for row in evaluations] == [(4, 24), (6, 24)]


class NormsEngine(ToyEngine):
    """Norms by name and a loss scale, as an engine reports them that has them."""

    def step(self, lr: float) -> StepOutcome:
        outcome = super().step(lr)
        norms = {"weight": outcome.grad_norm, "bias": math.inf}
        return dataclasses.replace(outcome, loss_scale=1024.0, grad_norms=norms)


def test_rows_hold_norms_by_name_and_the_loss_scale_where_there_are_some(tmp_path: Path) -> None:
    make_loop(tmp_path, engine=NormsEngine(Grid.layout(1)), total_steps=2).run()
    for row in read_rows(tmp_path / "metrics.jsonl"):
        assert row["grad_norms"] == {"weight": row["grad_norm"], "bias": None} and row["loss_scale"] == 1024.0


def test_floats_are_read_back_to_the_bit() -> None:
    values = [0.1, 1 / 3, 1e-300, 123456789.123456789, 2.0**-1074]
    row = json.loads(format_row({"step": 3, "values": None, **{f"v{i}": value for i, value in enumerate(values)}}))
    assert [row[f"v{i}"] for i in range(len(values))] == values
    assert '"v0": 0.10000000000000001' in format_row({"v0": 0.1})
    assert format_row({"loss": math.nan, "norm": math.inf}) == '{"loss": null, "norm": null}'


def test_an_unknown_peak_gives_no_mfu(tmp_path: Path) -> None:
    make_loop(tmp_path, total_steps=1, work=Work(10.0, None, 1)).run()
    row = training_row(tmp_path / "metrics.jsonl")
    assert row is not None and row["mfu"] is None


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_is_the_run_that_was_never_stopped(stop: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = make_loop(tmp_path / "whole", total_steps=25)
    whole.run()
    make_loop(tmp_path / "parts", total_steps=25, stop_after=stop).run()
    again = make_loop(tmp_path / "parts", total_steps=25)
    again.resume(step_path(again.checkpoints, stop))
    assert again.run() == whole.progress
    assert torch.equal(again.engine.weight, whole.engine.weight)  # type: ignore[attr-defined]
    assert torch.equal(again.engine.momentum, whole.engine.momentum)  # type: ignore[attr-defined]
    rows = [read_rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    assert without_times(rows[0]) == without_times(rows[1])


def test_checkpoints_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    make_loop(tmp_path, save_every=4).run()
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-00000004", "step-00000006"]


PROGRESS = {"step": 1, "position": 0, "tokens": 0}


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, "how far"),
        ({"progress": {"step": 1}}, "how far"),
        ({"progress": PROGRESS | {"step": -1}}, "how far"),
        ({"progress": PROGRESS | {"step": 1 << 80}}, "how far"),
        ({"progress": PROGRESS | {"tokens": "x" * 10_000}}, "how far"),
        ({"progress": PROGRESS | {"position": True}}, "how far"),
        ({"progress": [1, 2, 3]}, "how far"),
        ({"progress": "step"}, "how far"),
        ({"progress": PROGRESS, "callbacks": 7}, "how far"),
        ({"progress": PROGRESS, "metrics": {"loss": "x"}}, "how far"),
        ({"progress": PROGRESS, "metrics": {"loss": 10**400}}, "how far"),
        ({"progress": PROGRESS, "callbacks": {"StopOnNonFinite": [1]}}, "of the callback StopOnNonFinite is"),
        ({"progress": PROGRESS, "callbacks": {"StopOnNonFinite": {}}}, "not finite is None"),
        ({"progress": PROGRESS, "callbacks": {"StopOnNonFinite": {"count": "y" * 10_000}}}, "not finite is 'yyy"),
        ({"progress": PROGRESS, "callbacks": {"StopOnNonFinite": {"count": -1}}}, "not finite is -1"),
    ],
)
def test_values_of_the_run_that_make_no_sense_are_refused(extra: dict[str, Any], told: str, tmp_path: Path) -> None:
    make_loop(tmp_path).run()
    path = step_path(tmp_path / "checkpoints", 6)
    edit_manifest(path, lambda content: content.update(extra={"callbacks": {}} | extra))
    loop = make_loop(tmp_path, callbacks=Callbacks([StopOnNonFinite(3, False)]))
    with pytest.raises(CheckpointError, match=told) as refused:
        loop.resume(path)
    assert refused.value.agreed and len(str(refused.value)) < 1000 and "\n" not in str(refused.value)


# -------------------------------------------------------------------- rows on disk
def test_rows_after_a_step_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [format_row({"step": step, "loss": 0.1 * step}) for step in range(1, 6)]
    path.write_text("\n".join(lines) + '\n{"step": 6, "lo')
    assert cut_rows(path, 3) == 2
    assert path.read_text() == "\n".join(lines[:3]) + "\n"
    assert cut_rows(path, 3) == 0
    assert cut_rows(tmp_path / "none.jsonl", 3) == 0
    assert not (tmp_path / "none.jsonl").exists()


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot a row\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        cut_rows(path, 5)
    assert "not a row" in path.read_text()


def test_a_line_cut_off_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    logger = JsonLinesLogger(path)
    logger.log({"step": 2})
    logger.close()
    assert path.read_text().splitlines()[-1] == '{"step": 2}'


# -------------------------------------------------------------------- nothing to learn from, nothing finite
class Ignored:
    """Data whose every target is ignored."""

    def microbatches(self, position: int) -> list[Batch]:
        tokens = torch.ones(2, 3, dtype=torch.int64)
        return [Batch.of(tokens, torch.full_like(tokens, IGNORE_INDEX))]

    def next_position(self, position: int) -> int:
        return position + 2


class EmptyEngine(ToyEngine):
    def forward_backward(self, microbatches: Any) -> LossSum:
        return LossSum(0.0, sum(batch.count for batch in microbatches))


@pytest.mark.case(3)
def test_steps_without_a_token_count(tmp_path: Path) -> None:
    loop = make_loop(tmp_path, data=Ignored(), engine=EmptyEngine(Grid.layout(1)))
    loop.run()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [0.0] * 6
    assert [row["tokens"] for row in rows] == [0] * 6


class NonFiniteEngine(ToyEngine):
    """Gradients of steps 2 and 3, then of all from 5 on, are not finite."""

    def step(self, lr: float) -> StepOutcome:
        if self.steps in (2, 3) or self.steps >= 5:
            return StepOutcome(math.inf, False)
        return super().step(lr)


@pytest.mark.parametrize(("limit", "first", "last"), [(3, False, 7), (2, False, 3), (10, True, 2), (0, False, 9)])
def test_steps_in_a_row_that_are_not_finite_stop_the_run(limit: int, first: bool, last: int, tmp_path: Path) -> None:
    callbacks = Callbacks([StopOnNonFinite(limit, first)])
    loop = make_loop(tmp_path, engine=NonFiniteEngine(Grid.layout(1)), callbacks=callbacks, total_steps=9)
    if last == 9:
        loop.run()
    else:
        with pytest.raises(JobError, match="not finite") as stopped:
            loop.run()
        assert stopped.value.agreed
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert rows[-1]["step"] == last
    assert [row["step"] for row in rows if row.get("skipped")] == [s for s in (2, 3, 5, 6, 7, 8, 9) if s <= last]


def skipped_steps(stop: StopOnNonFinite, scaler: LossScaler, steps: int) -> int:
    """Overflows at every step; the last step before the run ended, or ``steps``."""
    for step in range(1, steps + 1):
        row = {"skipped": True, "loss_scale": scaler.scale}
        scaler.update(False)
        try:
            stop.on_step_end(step, row)
        except JobError as error:
            assert f"under the loss scale {row['loss_scale']:g}," in str(error)
            return step
    return steps


def test_a_search_for_the_loss_scale_ends_no_run_but_an_overflow_at_the_lowest_does() -> None:
    # 2^16 to 2^1 are sixteen steps of the search; then those at 1 count.
    assert skipped_steps(StopOnNonFinite(10, searches_scale=True), LossScaler(2.0**16), 99) == 26
    assert skipped_steps(StopOnNonFinite(10, True, searches_scale=True), LossScaler(2.0**16), 99) == 17
    assert skipped_steps(StopOnNonFinite(0, searches_scale=True), LossScaler(2.0**16), 99) == 99
    # A constant scale searches nothing.
    assert skipped_steps(StopOnNonFinite(10), LossScaler(2.0**16, 0), 99) == 10


def test_the_count_of_steps_that_are_not_finite_survives_a_resume() -> None:
    before = Callbacks([StopOnNonFinite(3)])
    before.call("on_step_end", 1, {"skipped": True})
    before.call("on_step_end", 2, {"skipped": True})
    after = Callbacks([StopOnNonFinite(3)])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    with pytest.raises(JobError, match="3 steps in a row"):
        after.call("on_step_end", 3, {"skipped": True})


# -------------------------------------------------------------------- callbacks
class Recorder(BaseCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.loaded: dict[str, Any] = {}

    def on_start(self, run: RunInfo, step: int) -> None:
        self.seen.append(f"start {step}")

    def on_step_start(self, step: int) -> None:
        self.seen.append(f"step {step}")

    def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
        self.seen.append(f"end of step {row['step']}")

    def on_evaluate(self, step: int, row: Mapping[str, Any]) -> None:
        self.seen.append(f"evaluate {step}")

    def on_save(self, step: int, path: str) -> None:
        assert (Path(path) / "manifest.json").exists()
        self.seen.append(f"save {step}")

    def on_end(self, step: int) -> None:
        self.seen.append(f"end {step}")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": len(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_moments_come_in_their_order_and_states_are_kept(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    loop = make_loop(
        tmp_path,
        total_steps=2,
        callbacks=Callbacks([first, second]),
        evaluation=EvaluationStream(Source(3), 4, 2, 1),
        evaluate_every=1,
    )
    loop.run()
    step = ["step {0}", "end of step {0}", "evaluate {0}"]
    expected = ["start 0", *(text.format(1) for text in step), *(text.format(2) for text in step), "save 2", "end 2"]
    assert first.seen == second.seen == expected
    third, fourth = Recorder(), Recorder()
    make_loop(tmp_path, callbacks=Callbacks([third, fourth])).resume(step_path(tmp_path / "checkpoints", 2))
    assert third.loaded == fourth.loaded == {"seen": 7}


class Failing(BaseCallback):
    def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
        if step == 2:
            raise ZeroDivisionError("of my own")


def test_a_failing_callback_fails_the_run_by_its_name_and_the_others_end(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(CallbackError, match=r"Failing failed in on_step_end: ZeroDivisionError\('of my own'\)"):
        make_loop(tmp_path, callbacks=Callbacks([Failing(), recorder])).run()
    assert recorder.seen[-1] == "end 2"


RUN = RunInfo(0, 1, "", 10, {})


def test_garbage_is_collected_at_its_steps_only() -> None:
    collected = []
    gc.callbacks.append(lambda phase, info: collected.append(info["generation"]) if phase == "stop" else None)
    callback = GarbageCollection(2)
    try:
        callback.on_start(RUN, 0)
        assert not gc.isenabled()
        collected.clear()
        for step in (1, 2, 3, 4):
            callback.on_step_end(step, {})
        assert len(collected) == 2
    finally:
        callback.on_end(4)
        gc.callbacks.pop()
    assert gc.isenabled()


def test_a_profile_of_its_steps_is_written(tmp_path: Path) -> None:
    callback = ProfilerWindow(2, 3)
    callback.on_start(dataclasses.replace(RUN, directory=str(tmp_path)), 0)
    for step in (1, 2, 3):
        callback.on_step_start(step)
        torch.ones(3) + torch.ones(3)
        callback.on_step_end(step, {})
    callback.on_end(3)
    events = json.loads((tmp_path / "profile" / "rank-0.json").read_text())["traceEvents"]
    assert len([event for event in events if event.get("name") == "aten::add"]) == 2


def test_stacks_are_written_on_a_long_step_and_on_a_signal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    callback = StackDump(timeout=0.1)
    callback.on_start(dataclasses.replace(RUN, directory=str(tmp_path), rank=3), 0)
    path = tmp_path / "stacks" / "rank-3.txt"
    try:
        callback.on_step_start(1)
        time.sleep(0.5)
        callback.on_step_end(1, {})
        assert "test_stacks_are_written" in path.read_text()
        written = len(path.read_text())
        signal.raise_signal(signal.SIGUSR2)
        assert "test_stacks_are_written" in path.read_text()[written:]
        printed = capfd.readouterr().err
        assert printed.startswith("rank 3")
        assert "test_stacks_are_written" in printed
    finally:
        callback.on_end(1)
        faulthandler.cancel_dump_traceback_later()
    assert signal.getsignal(signal.SIGUSR2) == before
