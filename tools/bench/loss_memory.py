"""Peak memory of the head's product and the loss, with their backward pass: each way alone in a process of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.launch import Launcher
from gridtron.core.supervise import run_local
from gridtron.tools.bench.memory import clear_peak, peak_beyond, resident

if TYPE_CHECKING:
    from torch import Tensor

PLAIN, CHUNKED = "F.linear and F.cross_entropy", "gridtron chunked"
BOUND = 0.25
"""Of the plain loss's peak that the chunked one may take."""


@dataclass(frozen=True)
class Head:
    """The work: float32, forward and backward, the weight's gradient included."""

    vocabulary: int = 131072
    hidden: int = 256
    tokens: int = 2048


HEADS = {"full": Head(), "small": Head(), "tiny": Head(1009, 32, 64)}


def measure_losses(shape: str) -> tuple[dict[str, Any], int]:
    """A record, empty where the system does not tell, and an exit code."""
    head, peaks = HEADS[shape], {}
    if not Path("/proc/self/clear_refs").exists():
        return {}, 0
    for name in ways():
        with tempfile.NamedTemporaryFile(suffix=".json") as result:
            if code := run_local(_run_alone, 1, (head, name, result.name), threads=1):
                return {}, code
            peaks[name] = json.loads(Path(result.name).read_text(encoding="utf-8"))
    share = peaks[CHUNKED] / peaks[PLAIN]
    return {**asdict(head), "peak_bytes": peaks, "share": share, "bound": BOUND, "holds": share <= BOUND}, 0


def ways() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Name -> the mean loss of (x, weight, target)."""
    import torch.nn.functional as F

    from gridtron.parallel import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

    return {
        PLAIN: lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
        "gridtron": lambda x, weight, target: vocab_parallel_cross_entropy(
            F.linear(x, weight), target, inplace=True
        ).mean(),
        CHUNKED: lambda x, weight, target: vocab_parallel_linear_cross_entropy(x, weight, target).mean(),
    }


def _run_alone(launcher: Launcher, head: Head, name: str, result: str) -> None:
    import torch

    torch.set_num_threads(1)
    loss_of = ways()[name]

    def run(head: Head) -> None:
        x = torch.randn(head.tokens, head.hidden, requires_grad=True)
        weight = torch.randn(head.vocabulary, head.hidden, requires_grad=True)
        loss_of(x, weight, torch.arange(head.tokens) % head.vocabulary).backward()

    run(HEADS["tiny"])  # what is imported on the way is not what the work holds
    before = resident()
    clear_peak()
    run(head)
    Path(result).write_text(json.dumps(peak_beyond(before)), encoding="utf-8")


def show_losses(record: dict[str, Any]) -> None:
    """One line a way."""
    from rich.console import Console
    from rich.table import Table

    if not record:
        return
    title = f"peak memory of head and loss: vocabulary {record['vocabulary']:,}, {record['tokens']:,} tokens"
    table = Table("", "MB", "share", "bound", title=title, title_justify="left")
    for name, size in record["peak_bytes"].items():
        cells = [name, f"{size / 2**20:,.0f}", f"{size / record['peak_bytes'][PLAIN]:.2f}"]
        held = f"{record['bound']:g} {'holds' if record['holds'] else 'missed'}"
        table.add_row(*cells, held if name == CHUNKED else "")
    Console().print(table)
