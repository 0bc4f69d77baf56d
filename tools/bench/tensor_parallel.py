"""One process and tensor parallelism beside the plain module, Hugging Face, Megatron-core and DTensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gridtron.tools.bench.sections import Section, found, run_sections

if TYPE_CHECKING:
    from gridtron.core.grid import Grid
    from gridtron.tools.bench.cli import BenchOptions
    from gridtron.tools.bench.measure import Contender
    from gridtron.tools.bench.plain import Shape


def run(options: BenchOptions) -> int:
    """Runs the sections, prints the tables, writes ``options.out``."""
    sections = []
    for shape in options.shapes:
        for ranks, sequence_parallel in ((1, False), (options.ranks, False), (options.ranks, True)):
            processes = "one process" if ranks == 1 else f"tensor={ranks}"
            title = f"{shape} shape, {processes}{', sequence parallel' * sequence_parallel}"
            sections.append(Section(title, shape, ranks, makers, "tensor", {"sequence_parallel": sequence_parallel}))
    return run_sections(options, sections, ("Megatron-core", "Hugging Face"))


def makers(shape: Shape, grid: Grid, peers: str, settings: Mapping[str, Any]) -> list[Callable[[], Contender]]:
    """What makes each contender of a section."""
    from gridtron.tools.bench import contenders
    from gridtron.tools.bench.megatron import megatron

    tensor, sequence_parallel = grid.world_size, settings["sequence_parallel"]
    made: list[Callable[[], Contender]] = [lambda: contenders.ours(shape, grid, sequence_parallel)]
    if tensor == 1:
        made.append(lambda: contenders.plain(shape))
        if found("Hugging Face", peers):
            made.append(lambda: contenders.huggingface(shape))
    else:
        made.append(lambda: contenders.dtensor(shape, sequence_parallel))
    if shape.vocabulary % tensor == 0 and found("Megatron-core", peers):  # it knows even shares only
        made.append(lambda: megatron(shape, tensor, sequence_parallel))
    return made
