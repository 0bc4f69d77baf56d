"""Data parallelism and ZeRO beside DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gridtron.tools.bench.sections import Section, run_sections

if TYPE_CHECKING:
    from gridtron.core.grid import Grid
    from gridtron.tools.bench.cli import BenchOptions
    from gridtron.tools.bench.measure import Contender
    from gridtron.tools.bench.plain import Shape


def run(options: BenchOptions) -> int:
    """Runs a section for each stage of ZeRO, prints the tables, writes ``options.out``."""
    sections = [
        Section(
            f"{shape} shape, data={options.ranks}, zero={zero}",
            shape,
            options.ranks,
            makers,
            "data",
            {"zero": zero},
            memory=True,
        )
        for shape in options.shapes
        for zero in (0, 1, 2, 3)
    ]
    return run_sections(options, sections, ())


def makers(shape: Shape, grid: Grid, peers: str, settings: Mapping[str, Any]) -> list[Callable[[], Contender]]:
    """What makes each contender of a section."""
    from gridtron.tools.bench import data_parallel_contenders as contenders

    zero = settings["zero"]
    peer = {0: contenders.replicated, 1: contenders.redundancy_free, 2: contenders.fully_sharded}
    return [lambda: contenders.ours(shape, grid, zero), lambda: peer[min(zero, 2)](shape, grid)]
