"""gridtron doctor says what is true of this machine, and of machines that are made up."""

import json
from dataclasses import replace

import pytest

from gridtron.core import capabilities
from gridtron.core.capabilities import find_apex, find_capabilities
from gridtron.core.kernels.config import AVAILABLE
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


# ---------------------------------------------------------------- the kernels' table
def kernels_of(monkeypatch, **changes):
    """Operation -> (implementation, why) as doctor finds them on a machine that is made up."""
    found = replace(find_capabilities(), **{"cuda_devices": (), "triton": None, "apex": None} | changes)
    monkeypatch.setattr(capabilities, "find_capabilities", lambda environment=None: found)
    return {name: (choice["backend"], choice["reason"]) for name, choice in examine()["kernels"].items()}


def test_kernels_of_machines_without_devices(monkeypatch):
    bare = kernels_of(monkeypatch)
    assert set(bare) == set(AVAILABLE) and {backend for backend, _ in bare.values()} == {"torch"}
    assert bare["rope"][1] == "auto; no triton: Triton is not installed"
    assert bare["rms_norm"][1] == "auto; no triton: Triton is not installed; no apex: NVIDIA apex is not installed"
    libraries = kernels_of(monkeypatch, triton="3.7.1", apex="nvidia")
    assert libraries["rms_norm"] == ("torch", "auto; no triton: no CUDA device; no apex: no CUDA device")
    interpreted = kernels_of(monkeypatch, triton="3.7.1", triton_interpreted=True)
    assert interpreted["rope"] == ("torch", "auto; no triton: its interpreter is asked for by name only")


@pytest.mark.parametrize(("folder", "found"), [("views", "other"), ("normalization", "nvidia")])
def test_kernels_with_either_apex(folder, found, tmp_path, monkeypatch, capsys):
    """A device without Triton: NVIDIA's apex is taken where it has the operation, PyPI's never."""
    for name in (folder, *(["optimizers"] if found == "nvidia" else [])):
        (tmp_path / "apex" / name).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    kernels = kernels_of(monkeypatch, cuda_devices=("NVIDIA H200",), apex=find_apex())
    assert kernels["adamw"][0] == kernels["layer_norm"][0] == ("apex" if found == "nvidia" else "torch")
    assert kernels["swiglu"] == ("torch", "auto; no triton: Triton is not installed")
    if found == "other":
        assert kernels["adamw"][1].endswith("no apex: the apex that is installed is not NVIDIA's")
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "kernels under kernels.backend=auto" in shown and "linear_cross_entropy" in shown


def test_kernels_of_a_device_with_triton(monkeypatch):
    kernels = kernels_of(monkeypatch, cuda_devices=("NVIDIA H200",), triton="3.7.1", apex="nvidia")
    assert set(kernels.values()) == {("triton", "auto")}
