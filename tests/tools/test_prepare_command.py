"""``gridtron prepare``: the table for a person, the file for a program."""

import json

import pytest

from gridtron.tools.cli import main


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "t.txt").write_text("hello world")


def test_table_and_file(capsys, tmp_path):
    assert main(["prepare", "data.path=t.txt", "out=summary.json"]) == 0
    table = capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tokens"] == 11 and summary["tokenizer"] == "bytes" and summary["documents"] == 1
    assert all(name in table for name in summary) and summary["sha256"] in table and summary["prefix"] in table
    assert str(tmp_path / "cache" / "gridtron") in summary["prefix"]


def test_out_that_cannot_be_written(capsys):
    assert main(["prepare", "data.path=t.txt", "out=/no/such/folder/x.json"]) == 2
    assert "out=/no/such/folder/x.json: No such file or directory; give another file" in capsys.readouterr().err


def test_tokenizer_that_is_none(capsys):
    assert main(["prepare", "data.path=t.txt", "data.tokenizer=t.txt"]) == 2
    assert "not a tokenizer.json" in capsys.readouterr().err
