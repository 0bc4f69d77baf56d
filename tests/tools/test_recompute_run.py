"""A run that chooses what to recompute learns what any other does, and says what it chose."""

import json
import re

import pytest

from gridtron.core.training.metrics import read_rows
from gridtron.tools.train import main


@pytest.mark.slow
def test_a_run_within_a_budget(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text.txt").write_text("all work and no play makes a dull text of it\n" * 400)
    words = [
        "model=tiny",
        "model.num_layers=6",
        "model.dropout=0.1",
        "precision=fp64",
        "train.steps=2",
        "train.global_batch_size=4",
        "train.micro_batch_size=4",
        "data.path=text.txt",
        f"data.directory={tmp_path / 'data'}",
        "logging.tensorboard=false",
    ]
    assert main([*words, "run.directory=plain"]) == 0
    assert main([*words, "recompute=auto", "recompute.budget_bytes=1", "run.directory=refused"]) == 2
    need = int(re.search(r"nearest: recompute\.budget_bytes=(\d+)", capfd.readouterr().err)[1])
    assert not (tmp_path / "refused").exists()
    assert main([*words, "recompute=auto", f"recompute.budget_bytes={need}", "run.directory=chosen"]) == 0
    chosen = json.loads((tmp_path / "chosen" / "environment.json").read_text())["recompute"]
    assert len(chosen) == 6 and "full" in chosen
    plain, found = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("plain", "chosen"))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in plain] == [row[key] for row in found]
