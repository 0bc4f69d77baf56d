"""Rows of ``metrics.jsonl``: what a step cost and gave, and the file they are appended to."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.files import write_whole

if TYPE_CHECKING:
    import torch


def format_row(row: Mapping[str, Any]) -> str:
    """One line of JSON; floats with 17 significant digits, from which the same double is read back.

    What is not finite has no number in JSON and is null.
    """
    return "{" + ", ".join(f"{json.dumps(key)}: {_format(value)}" for key, value in row.items()) + "}"


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.17g}" if math.isfinite(value) else "null"
    if isinstance(value, Mapping):
        return format_row(value)
    return json.dumps(value)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that was cut off in writing is left out. Empty where there is no file."""
    if not path.exists():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines) and line.strip():
            raise ValueError(f"{path}, line {number} is not a row of metrics: {line[:60]!r}; repair or remove the line")
    return rows


def cut_rows(path: Path, last_step: int) -> int:
    """Keeps the rows up to ``last_step`` (all at once or not at all) and returns how many were cut."""
    rows = read_rows(path)
    kept = [row for row in rows if isinstance(row.get("step"), int) and row["step"] <= last_step]
    content = "".join(format_row(row) + "\n" for row in kept).encode()
    if path.exists() and content != path.read_bytes():
        write_whole(path, content)
    return len(rows) - len(kept)


def training_row(path: Path) -> dict[str, Any] | None:
    """The last training step's row of a file."""
    rows = [row for row in read_rows(path) if "grad_norm" in row]
    return rows[-1] if rows else None


def peak_memory(device: torch.device) -> int:
    """Bytes: the device's peak of allocated memory; on the CPU the peak of this process's resident memory."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, but bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Work:
    """What the throughput is held against.

    Args:
        flops_per_token: model FLOPs of one trained token, forward and backward; 0 where they are not known.
        peak_flops: of one device, FLOPs per second; None where it is not known.
        devices: number of ranks.
    """

    flops_per_token: float
    peak_flops: float | None
    devices: int


class StepTimer:
    """Times steps by the clock of this rank; the device's queue is empty at both ends.

    Args:
        device: of this rank.
        work: for the share of the peak.
    """

    def __init__(self, device: torch.device, work: Work):
        self._device = device
        self._work = work
        self._began = 0.0

    def start(self) -> None:
        self._began = self._now()

    def stop(self, counted: int, processed: int) -> dict[str, Any]:
        """What a row says of cost, given the step's unignored tokens and all of its tokens, over the whole grid."""
        seconds = self._now() - self._began
        work = self._work
        mfu = None
        if work.peak_flops and work.flops_per_token:
            mfu = work.flops_per_token * processed / seconds / (work.peak_flops * work.devices)
        return {
            "tokens_per_second": counted / seconds,
            "step_seconds": seconds,
            "memory_bytes": peak_memory(self._device),
            "mfu": mfu,
        }

    def _now(self) -> float:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def count_tokens(microbatches: Sequence[Any]) -> int:
    """All tokens of microbatches, ignored ones too."""
    return sum(batch.tokens.numel() for batch in microbatches)
