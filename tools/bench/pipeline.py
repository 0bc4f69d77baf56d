"""Pipeline schedules beside torch.distributed.pipelining and Megatron-core, on stages of equal weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.supervise import run_local
from gridtron.parallel.pipeline.build import FAMILIES
from gridtron.tools.bench.sections import Section, found, run_sections

if TYPE_CHECKING:
    from gridtron.core.grid import Grid
    from gridtron.tools.bench.cli import BenchOptions
    from gridtron.tools.bench.measure import Contender
    from gridtron.tools.bench.plain import Shape
    from gridtron.tools.bench.sleeps import Row

_SLEEPING_RANKS, _REPEATS = 4, 3
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v")


def run(options: BenchOptions) -> int:
    """Runs a section for each schedule, prints the tables, writes ``options.out``."""
    sections = [
        Section(
            f"{shape} shape, pipeline={options.ranks}, {schedule}, {options.microbatches} microbatches",
            shape,
            options.ranks,
            makers,
            "pipeline",
            {"schedule": schedule, "microbatches": options.microbatches},
            memory=True,
        )
        for shape in options.shapes
        for schedule in SCHEDULES
    ]
    rows, code = run_sleeps(_SLEEPING_RANKS, options.microbatches)
    return code or run_sections(options, sections, ("Megatron-core",), {"sleeps": [asdict(row) for row in rows]})


def run_sleeps(ranks: int, microbatches: int) -> tuple[list[Row], int]:
    """Every family on stages that sleep; the rows, shown, and an exit code."""
    from gridtron.tools.bench.sleeps import Row, measure_sleeps, show_sleeps

    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        code = run_local(measure_sleeps, ranks, (list(FAMILIES), microbatches, _REPEATS, result.name), threads=1)
        rows = [] if code else [Row(**row) for row in json.loads(Path(result.name).read_text(encoding="utf-8"))]
    if rows:
        show_sleeps(rows)
    return rows, code


def makers(shape: Shape, grid: Grid, peers: str, settings: Mapping[str, Any]) -> list[Callable[[], Contender]]:
    """What makes each contender of a section."""
    from gridtron.tools.bench import pipeline_contenders
    from gridtron.tools.bench.megatron import megatron

    schedule, microbatches = settings["schedule"], settings["microbatches"]
    made: list[Callable[[], Contender]] = [
        lambda: pipeline_contenders.ours(shape, grid, schedule, microbatches),
        lambda: pipeline_contenders.torch_pipelining(shape, grid, schedule, microbatches),
    ]
    if schedule != "zb_v" and found("Megatron-core", peers):
        chunks = 2 if schedule == "interleaved_1f1b" else 1
        made.append(lambda: megatron(shape, 1, pipeline=grid.world_size, chunks=chunks, microbatches=microbatches))
    return made
