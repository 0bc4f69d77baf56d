"""gridtron doctor says what is true of this machine, and of machines that are made up."""

import json

import pytest

from gridtron.core.capabilities import find_apex, find_capabilities
from gridtron.tools.doctor import _advice, examine, main


def test_findings_and_file(tmp_path, capsys):
    import torch

    out = tmp_path / "doctor.json"
    assert main([f"out={out}"]) == 0
    findings = json.loads(out.read_text())
    assert findings["libraries"]["torch"] == torch.__version__ and findings["gloo"]
    assert findings["capabilities"]["cpu_cores"] >= 1
    shown = capsys.readouterr().out
    assert "CPU" in shown and torch.__version__ in shown


@pytest.mark.parametrize("words", [["train"], ["-m"], ["out=/nowhere/at/all.json"]])
def test_refusals(words, capsys):
    assert main(words) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folders", "expected"), [(["normalization", "optimizers"], "nvidia"), (["views"], "other"), (None, None)]
)
def test_which_apex(folders, expected, tmp_path, monkeypatch):
    """PyPI's apex is another project; NVIDIA's is known by its fused parts, without importing it."""
    if folders is not None:
        package = tmp_path / "apex"
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemExit('imported')")
        for folder in folders:
            (package / folder).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_apex() == expected
    assert find_capabilities().apex == expected
    advice = " ".join(_advice(examine()))
    assert ("not NVIDIA's" in advice) == (expected == "other")


def test_advice_for_machines_that_lack_things():
    findings = examine()
    findings["libraries"] |= {"tokenizers": None, "torch": "2.9.0"}
    findings["capabilities"] |= {"cuda_devices": ["NVIDIA H200"], "nccl": False, "triton": None}
    advice = " ".join(_advice(findings))
    assert "missing: tokenizers" in advice and "2.11 to 2.13" in advice and "NCCL" in advice and "Triton" in advice
