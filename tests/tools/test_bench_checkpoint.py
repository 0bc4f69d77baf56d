"""The bench of checkpoints does what it says, on a tiny state; no timed claim."""

import json
from pathlib import Path

import pytest

from gridtron.tools.bench.checkpoint import BOUNDS, STATES
from gridtron.tools.bench.cli import main


def test_shapes_are_as_large_as_they_say() -> None:
    assert 1e9 < STATES["full"].nbytes < 1.1e9 and 2.4e8 < STATES["small"].nbytes < 2.8e8
    assert len(STATES["full"].shapes()) == 7 * 7 * 3


def test_a_tiny_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "shape=tiny", "pairs=4", "warmup=0", "out=bench.json"]) == 0
    figures = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [section["part"] for section in figures["sections"]] == list(BOUNDS)
    for section in figures["sections"]:
        assert section["equal_work"] and section["ratio"]["pairs"] == 4
        assert section["holds"] == (section["ratio"]["low"] <= section["bound"])
    assert figures["page_cache"] == "warm"
    printed = capfd.readouterr().out
    assert "save: 1 MB over 2 ranks" in printed and "gridtron in the background" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
