"""``gridtron doctor``: what this machine has, what is missing, and what that means."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gridtron.conf.refusal import Refusal
from gridtron.tools.arguments import parse_arguments, print_refusal

_LIBRARIES = (
    "torch",
    "numpy",
    "einops",
    "hydra-core",
    "omegaconf",
    "rich",
    "pillow",
    "tensorboard",
    "safetensors",
    "tokenizers",
)
_OPTIONAL = ("triton", "wandb")


def main(arguments: Sequence[str]) -> int:
    """Prints the findings, and writes them to ``out=FILE.json``; 0 whatever it finds, since nothing had to run."""
    try:
        parsed = parse_arguments(arguments)
        foreign = [word for word in parsed.overrides if not word.startswith("out=")]
        if foreign or parsed.sweep:
            raise Refusal([f"{(foreign or ['-m'])[0]}: doctor takes out=FILE.json only"])
        findings = examine()
        for word in parsed.overrides:
            _write(Path(word.partition("=")[2]).expanduser(), findings)
    except Refusal as refusal:
        return print_refusal(refusal)
    _show(findings)
    return 0


def _write(file: Path, findings: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(findings, indent=1) + "\n", encoding="utf-8")
    except OSError as fault:
        raise Refusal([f"out={file}: {fault.strerror}; give another file"]) from None


def examine() -> dict[str, Any]:
    """Devices, versions, launcher and advice, as JSON can hold them."""
    import importlib.metadata
    import os

    import torch

    import gridtron
    from gridtron.core.capabilities import find_capabilities
    from gridtron.core.kernels.config import AVAILABLE, KernelsConfig, choose
    from gridtron.core.launch import find_launcher

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    found = find_capabilities(os.environ)
    try:
        launcher = asdict(find_launcher(os.environ))
    except ValueError as fault:
        launcher = {"name": "broken", "fault": str(fault)}
    findings: dict[str, Any] = {
        "gridtron": gridtron.__version__,
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in (*_LIBRARIES, *_OPTIONAL)},
        "capabilities": asdict(found),
        "cuda": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "launcher": launcher,
        "kernels": {name: asdict(choose(KernelsConfig(), name, found)) for name in AVAILABLE},
    }
    findings["advice"] = _advice(findings)
    return findings


def _advice(findings: dict[str, Any]) -> list[str]:
    """What is missing and what it means, one line each."""
    lines = []
    found = findings["capabilities"]
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        lines.append(f"Python {findings['python']} is outside the supported 3.11 to 3.13")
    release = tuple(int(part) for part in findings["libraries"]["torch"].split("+")[0].split(".")[:2])
    if not (2, 11) <= release < (2, 14):
        lines.append(f"torch {findings['libraries']['torch']} is outside the supported 2.11 to 2.13")
    missing = [name for name in _LIBRARIES if findings["libraries"][name] is None]
    if missing:
        lines.append(f"missing: {', '.join(missing)}; pip install gridtron brings them")
    if not found["cuda_devices"]:
        lines.append("no CUDA device: runs use the CPU and gloo, in float32 unless precision says otherwise")
        if findings["cuda"]:
            lines.append(f"this torch was built for CUDA {findings['cuda']}: the driver or the device is missing")
    elif not found["nccl"]:
        lines.append("CUDA without NCCL: several GPUs cannot talk; install a torch built with NCCL")
    if found["triton"] is None:
        lines.append("no Triton: optional, pip install 'gridtron[triton]'")
    tried = "its adapters were tested on a stand-in with the signatures of its source, not on apex itself"
    if found["apex"] == "nvidia":
        lines.append(f"NVIDIA apex: {tried}")
    elif found["apex"] == "other":
        lines.append("the apex that is installed is not NVIDIA's (PyPI's is another project): it is not used")
    else:
        lines.append(f"no NVIDIA apex: optional, built from NVIDIA's source tree, never from PyPI; {tried}")
    return lines


def _show(findings: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    found = findings["capabilities"]
    launcher = findings["launcher"]
    rows = {
        "gridtron": findings["gridtron"],
        "Python": findings["python"],
        "CPU": f"{found['cpu_cores']} cores, {findings['cpu_capability']}",
        "CUDA devices": ", ".join(found["cuda_devices"]) or "none",
        "CUDA of this torch": findings["cuda"] or "none (a CPU build)",
        "bf16 on the GPU": "yes" if found["bf16"] else "no",
        "NCCL, gloo": f"{'yes' if found['nccl'] else 'no'}, {'yes' if findings['gloo'] else 'no'}",
        **{name: value or "missing" for name, value in findings["libraries"].items()},
        "apex": {"nvidia": "NVIDIA's", "other": "not NVIDIA's", None: "missing"}[found["apex"]],
        "launcher": launcher.get("fault") or f"{launcher['name']}, rank {launcher['rank']} of {launcher['world_size']}",
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, str(value))
    kernels = Table("operation", "kernel", "why", title="kernels under kernels.backend=auto", title_justify="left")
    for name, choice in findings["kernels"].items():
        kernels.add_row(name, choice["backend"], choice["reason"])
    console = Console()
    console.print(table)
    console.print(kernels)
    for line in findings["advice"]:
        console.print(f"- {line}")
