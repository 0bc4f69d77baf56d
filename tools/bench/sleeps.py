"""The simulator held against real ranks: stages that sleep, so that no processor is shared and the costs are known."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gridtron.core.communication import barrier, gather_values
from gridtron.core.grid import Grid
from gridtron.core.launch import Launcher
from gridtron.parallel.gradient_door import deferral_of
from gridtron.parallel.pipeline import PipelineRunner, build_schedule, simulate
from gridtron.parallel.pipeline.trace import Trace

SECONDS = 0.02
"""Of a forward pass, and of each half of a backward pass."""


@dataclass(frozen=True)
class Row:
    """One schedule: seconds from the first start to the last end, measured (median) and simulated."""

    schedule: str
    ranks: int
    microbatches: int
    measured: float
    simulated: float

    @property
    def ratio(self) -> float:
        return self.measured / self.simulated


class Sleep(nn.Module):
    """The identity, which takes ``SECONDS`` for F, I and W each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x, self.weight)
        return out


class _Sleep(torch.autograd.Function):
    defers_weight_gradients = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.deferral = deferral_of(weight)
        if ctx.deferral is not None:
            ctx.deferral.able.add(weight)
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(SECONDS)
        work = partial(time.sleep, SECONDS)
        if ctx.deferral is not None and ctx.deferral.active:
            ctx.deferral.push(work)
        else:
            work()
        return gradient.clone(), None


def measure_sleeps(launcher: Launcher, names: list[str], microbatches: int, repeats: int, result: str) -> None:
    """One rank: every schedule ``repeats`` times after one run before; rank 0 writes the rows."""
    torch.set_num_threads(1)
    rows = []
    with Grid.create(pipeline=-1, launcher=launcher, device="cpu") as grid:
        for name in names:
            schedule = build_schedule(name, grid.pipeline.size, microbatches)
            stages = {stage: Sleep() for stage in schedule.stages(grid.pipeline.rank)}
            runner = PipelineRunner(stages, schedule, grid.pipeline)
            data = [torch.ones(1, requires_grad=True) for _ in range(microbatches)]
            spans = []
            for _ in range(1 + repeats):
                runner.trace = Trace()
                barrier(grid.pipeline)
                runner.step(data)
                ends = gather_values((runner.trace.spans[0].start, runner.trace.spans[-1].end), grid.pipeline)
                spans.append(max(end for _, end in ends) - min(start for start, _ in ends))
            expected = simulate(schedule, SECONDS, None, SECONDS, SECONDS).makespan
            rows.append(Row(name, grid.world_size, microbatches, median(spans[1:]), expected))
        if grid.rank == 0:
            Path(result).write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


def show_sleeps(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    title = f"stages that sleep {1000 * SECONDS:.0f} ms for F, I and W each: {first.ranks} ranks, "
    table = Table(title=title + f"{first.microbatches} microbatches", title_justify="left")
    for column in ("schedule", "seconds measured", "simulated", "measured / simulated"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in rows:
        table.add_row(row.schedule, f"{row.measured:.3f}", f"{row.simulated:.3f}", f"{row.ratio:.3f}")
    Console(width=None if Console().is_terminal else 110).print(table)
