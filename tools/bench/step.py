"""The scoreboard: one training step of this GPT beside every peer, on one process and over each axis of two."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.conf.rules import compiler_fault
from gridtron.tools.bench import data_parallel, pipeline, tensor_parallel
from gridtron.tools.bench.chart import draw_chart, show_bars
from gridtron.tools.bench.loss_memory import measure_losses, show_losses
from gridtron.tools.bench.sections import Section, run_sections

if TYPE_CHECKING:
    from gridtron.core.grid import Grid
    from gridtron.tools.bench.cli import BenchOptions
    from gridtron.tools.bench.measure import Contender
    from gridtron.tools.bench.plain import Shape

FLOOR = "its matrix products alone"
ONE_PROCESS = {"plain module": 0.95, "Hugging Face": 0.9, "Megatron-core": 0.85, FLOOR: 1.15}
"""Largest ratios that are aimed at on one process; over tensor ranks those of TENSOR."""
TENSOR = {"DTensor": 0.85, "Megatron-core": 0.85}


def run(options: BenchOptions) -> int:
    """Runs the sections, prints tables and bars, writes ``options.out`` and ``options.chart``."""

    def finish(figures: Mapping[str, Any]) -> None:
        show_bars(figures["sections"])
        if options.chart is not None:
            draw_chart(figures, Path(options.chart).expanduser())

    if fault := compiler_fault(0, os.environ):
        print(f"missing: gridtron compiled ({fault}); the others run without it")
    record, code = measure_losses(options.shapes[0])
    if code:
        return code
    show_losses(record)
    sections = [section for shape in options.shapes for section in sections_of(shape, options, not fault)]
    return run_sections(options, sections, ("Megatron-core", "Hugging Face"), {"loss_memory": record}, finish)


def sections_of(shape: str, options: BenchOptions, compiled: bool) -> list[Section]:
    """What is compared at one shape; ``compiled``: with this GPT's layers compiled as well."""
    ranks, microbatches = options.ranks, options.microbatches
    whole, alone = {"sequence_parallel": False}, {"compiled": compiled}
    schedule = {"schedule": "1f1b", "microbatches": microbatches}
    return [
        Section(f"{shape} shape, one process", shape, 1, one_process, "tensor", alone, bounds=ONE_PROCESS),
        Section(f"{shape} shape, tensor={ranks}", shape, ranks, tensor_parallel.makers, "tensor", whole, bounds=TENSOR),
        Section(f"{shape} shape, data={ranks}", shape, ranks, data_parallel.makers, "data", {"zero": 0}),
        Section(f"{shape} shape, data={ranks}, zero=3", shape, ranks, data_parallel.makers, "data", {"zero": 3}),
        Section(
            f"{shape} shape, pipeline={ranks}, 1F1B, {microbatches} microbatches",
            shape,
            ranks,
            pipeline.makers,
            "pipeline",
            schedule,
        ),
    ]


def one_process(shape: Shape, grid: Grid, peers: str, settings: Mapping[str, Any]) -> list[Callable[[], Contender]]:
    """Those of the tensor-parallel bench, this GPT with its layers compiled, and the floor."""
    from gridtron.tools.bench.contenders import ours
    from gridtron.tools.bench.floor import products_alone

    made = tensor_parallel.makers(shape, grid, peers, {"sequence_parallel": False})
    if settings["compiled"]:
        made.append(lambda: ours(shape, grid, compiled=True))
    return [*made, lambda: products_alone(shape)]
