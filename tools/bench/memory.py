"""Peak memory of each contender of a section, alone in processes of its own: what is held beyond its imports."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.launch import Launcher
from gridtron.core.supervise import run_local

if TYPE_CHECKING:
    from gridtron.tools.bench.sections import Section

_STEPS = 3


def measure_memory(section: Section, peers: str) -> tuple[dict[str, float], int]:
    """Contender -> bytes of the rank that needs most, and an exit code; empty where the system does not tell."""
    found: dict[str, float] = {}
    if not Path("/proc/self/clear_refs").exists():
        return found, 0
    index, count = 0, 1
    while index < count:
        with tempfile.NamedTemporaryFile(suffix=".json") as result:
            code = run_local(_run_alone, section.ranks, (section, index, peers, result.name), threads=1)
            if code:
                return found, code
            name, size, count = json.loads(Path(result.name).read_text(encoding="utf-8"))
        found[name] = size
        index += 1
    return found, 0


def _run_alone(launcher: Launcher, section: Section, index: int, peers: str, result: str) -> None:
    import warnings

    import torch

    from gridtron.core.communication import gather_values
    from gridtron.core.grid import Grid
    from gridtron.tools.bench.plain import SHAPES

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shape = SHAPES[section.shape]
    small = replace(shape, vocabulary=128, hidden=32, heads=2, key_value_heads=2, ffn=32, sequence=16)
    sizes: dict[str, Any] = {section.axis: -1}
    with Grid.create(launcher=launcher, device="cpu", **sizes) as grid:
        # A small one first: what is imported on the way is not what the work holds.
        section.makers(small, grid, peers, section.settings)[index]().step(0)
        makers = section.makers(shape, grid, peers, section.settings)
        before = resident()
        clear_peak()
        contender = makers[index]()
        for step in range(_STEPS):
            contender.step(step)
        held = gather_values(peak_beyond(before), grid.axis(section.axis))
        if grid.rank == 0:
            Path(result).write_text(json.dumps([contender.name, max(held), len(makers)]), encoding="utf-8")


def resident() -> int:
    """Bytes that this process holds now."""
    return 1024 * _kilobytes("VmRSS")


def clear_peak() -> None:
    """The peak is counted from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_beyond(before: int) -> int:
    """Bytes of the peak above ``before``."""
    return 1024 * _kilobytes("VmHWM") - before


def _kilobytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])
