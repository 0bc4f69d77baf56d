"""What rank 0 shows and writes for a person."""

from pathlib import Path
from typing import Any

import pytest

from gridtron.core.training.loggers import ConsoleLogger, TensorBoardLogger, describe_row, show_grid, time_left


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self, terminal: bool) -> None:
        self.text, self.terminal, self.encoding = "", terminal, "utf-8"

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self.terminal


ROW = {"step": 3, "loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 12345.0, "step_seconds": 2.0}


def test_plain_lines_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = Terminal(False)
    console = ConsoleLogger(100, every=3, stream=stream)
    for step in range(1, 8):
        console.log(ROW | {"step": step})
    console.log({"step": 7, "eval_loss": 2.25})
    console.close()
    lines = stream.text.splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "3/100", "6/100", "7/100"]
    assert lines[1] == "step 3/100  loss 2.5000  norm 1  lr 0.001  12.3k tokens/s  3:14 left"
    assert "evaluation: loss 2.2500" in lines[-1]
    assert "\x1b" not in stream.text


def test_a_bar_and_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream: Any = Terminal(True)
    show_grid({"data": 2, "tensor": 4}, ("data", "tensor"), {"run": "here"}, stream)
    console = ConsoleLogger(4, done=2, stream=stream)
    console.log(ROW)
    console.log({"step": 3, "eval_loss": 2.25})
    console.close()
    for expected in ("tensor", "│", "3/4", "loss 2.5000", "12.3k tokens/s", "0:02 left", "evaluation: loss 2.2500"):
        assert expected in stream.text, expected


def test_times_and_skipped_steps_in_words() -> None:
    assert [time_left(seconds) for seconds in (0, 59.6, 3599, 3600, 90061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]
    assert "step skipped" in describe_row(ROW | {"skipped": True}, 5)


def test_tensorboard_has_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    logger.log(ROW | {"mfu": None, "grad_norms": {"blocks.0.norm.weight": 0.5}})
    logger.log({"step": 4, "eval_loss": 2.25})
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Scalars("train/loss")[0].value == 2.5
    assert events.Scalars("evaluation/eval_loss")[0].step == 4
    assert events.Scalars("grad_norms/blocks.0.norm.weight")[0].value == 0.5
    assert not {"train/mfu", "train/grad_norms"} & set(events.Tags()["scalars"])
