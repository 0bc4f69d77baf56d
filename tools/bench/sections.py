"""A benchmark in sections: each runs its contenders step by step in turn, in processes of its own."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.launch import Launcher
from gridtron.core.supervise import run_local
from gridtron.tools.bench.environment import describe_environment
from gridtron.tools.bench.memory import measure_memory

if TYPE_CHECKING:
    from gridtron.core.grid import Grid
    from gridtron.tools.bench.cli import BenchOptions
    from gridtron.tools.bench.measure import Contender, Ratio
    from gridtron.tools.bench.plain import Shape

PEER_PACKAGES = {"Megatron-core": "megatron.core", "Hugging Face": "transformers"}
_SAME_LOSS = 2e-3

Makers = Callable[["Shape", "Grid", str, Mapping[str, Any]], "list[Callable[[], Contender]]"]


@dataclass(frozen=True)
class Section:
    """What is compared at once.

    Args:
        title: of the table.
        shape: name of the work.
        ranks: processes.
        makers: a module's function: (shape, grid, peers' folder, settings) -> what makes each contender, ours first.
        axis: the axis of the grid that takes all ranks.
        settings: handed to ``makers``.
        memory: measure the peak memory of each as well.
        bounds: contender -> the largest ratio to it that is allowed.
    """

    title: str
    shape: str
    ranks: int
    makers: Makers
    axis: str = "tensor"
    settings: Mapping[str, Any] = field(default_factory=dict)
    memory: bool = False
    bounds: Mapping[str, float] = field(default_factory=dict)


def run_sections(
    options: BenchOptions,
    sections: Sequence[Section],
    peers: Sequence[str],
    more: Mapping[str, Any] | None = None,
    finish: Callable[[Mapping[str, Any]], None] | None = None,
) -> int:
    """Runs the sections, prints the tables, writes ``options.out`` with ``more``, hands all of it to ``finish``; the
    first failing exit code."""
    missing = [name for name in peers if not found(name, options.peers)]
    for name in missing:
        print(f"missing: {name} (make peers installs it); the others run without it")
    records = []
    for section in sections:
        with tempfile.NamedTemporaryFile(suffix=".json") as result:
            arguments = (section, options.pairs, options.warmup, options.peers, result.name)
            code = run_local(_run_section, section.ranks, arguments, threads=1)
            if code:
                return code
            records.append(json.loads(Path(result.name).read_text(encoding="utf-8")))
        if section.memory:
            records[-1]["memory_bytes"], code = measure_memory(section, options.peers)
            if code:
                return code
        _show(records[-1])
    figures = {"environment": describe_environment(), "missing": missing, "sections": records, **(more or {})}
    if options.out:
        Path(options.out).expanduser().write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if finish is not None:
        finish(figures)
    return 0


def found(peer: str, folder: str) -> bool:
    """Whether a peer's package can be imported, from the environment or from ``folder``."""
    if folder not in sys.path and Path(folder).is_dir():
        # Last, so that the environment's own packages go before those of the peers.
        sys.path.append(str(Path(folder).resolve()))
    try:
        return importlib.util.find_spec(PEER_PACKAGES[peer]) is not None
    except ModuleNotFoundError:
        return False


def _run_section(launcher: Launcher, section: Section, pairs: int, warmup: int, peers: str, result: str) -> None:
    """One rank of one section: all contenders in one process, step by step in turn."""
    import warnings

    import torch
    import torch.distributed as dist

    from gridtron.core.communication import barrier
    from gridtron.core.grid import Grid
    from gridtron.tools.bench.measure import alternate, compare
    from gridtron.tools.bench.plain import SHAPES

    warnings.simplefilter("ignore")  # the peers' own, of libraries that a CPU does not have
    torch.set_num_threads(1)
    if launcher.world_size == 1:  # Megatron-core wants torch.distributed in one process too
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shape = SHAPES[section.shape]
    sizes: dict[str, Any] = {section.axis: -1}
    with Grid.create(launcher=launcher, device="cpu", **sizes) as grid:
        contenders = [make() for make in section.makers(shape, grid, peers, section.settings)]
        with RoundsBar(section.title, warmup + pairs, grid.rank == 0) as advance:
            seconds, losses = alternate(contenders, pairs, warmup, lambda: barrier(grid.axis(section.axis)), advance)
        if grid.rank == 0:
            ratios = [compare(seconds, contenders[0].name, peer.name) for peer in contenders[1:]]
            losses = {contender.name: losses[contender.name] for contender in contenders if contender.trains}
            record = {
                "title": section.title,
                "shape": asdict(shape),
                "ranks": grid.world_size,
                "seconds": seconds,
                "losses": {name: [values[0], values[-1]] for name, values in losses.items()},
                "equal_losses": _equal(losses),
                "ratios": [asdict(ratio) | held_against(ratio, section.bounds) for ratio in ratios],
            }
            Path(result).write_text(json.dumps(record), encoding="utf-8")


def held_against(ratio: Ratio, bounds: Mapping[str, float]) -> dict[str, Any]:
    """A ratio's bound, and whether it holds; nothing where there is none."""
    bound = bounds.get(ratio.peer)
    return {} if bound is None else {"bound": bound, "holds": ratio.holds(bound)}


def _equal(losses: dict[str, list[float]]) -> bool:
    """Whether every contender had the same losses throughout: then they did the same work."""
    columns = list(zip(*losses.values(), strict=True))
    return all(max(column) - min(column) <= _SAME_LOSS for column in columns)


class RoundsBar:
    """A bar on standard error, where that is a terminal, on rank 0."""

    def __init__(self, title: str, rounds: int, shown: bool):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, disable=not (shown and console.is_terminal))
        self.task = self.bar.add_task(title, total=rounds)

    def __enter__(self) -> Callable[[], None]:
        self.bar.start()
        return lambda: self.bar.advance(self.task)

    def __exit__(self, *exception: Any) -> None:
        self.bar.stop()


def _show(record: dict[str, Any]) -> None:
    import statistics

    from rich.console import Console
    from rich.table import Table

    table = Table(title=record["title"], title_justify="left")
    memory = record.get("memory_bytes", {})
    bounded = any("bound" in ratio for ratio in record["ratios"])
    columns = ["", "seconds a step", "first loss", "last loss", "gridtron / it", "95% interval"]
    columns += ["bound"] if bounded else []
    for column in [*columns, *(["peak MB a rank"] if memory else [])]:
        table.add_column(column, justify="left" if not column else "right")
    ratios = {ratio["peer"]: ratio for ratio in record["ratios"]}
    for name, seconds in record["seconds"].items():
        cells = [name, f"{statistics.median(seconds):.3f}"]
        cells += [f"{loss:.4f}" for loss in record["losses"].get(name, ())] or ["", ""]
        ratio = ratios.get(name)
        cells += [f"{ratio['median']:.3f}", f"{ratio['low']:.3f} to {ratio['high']:.3f}"] if ratio else ["", ""]
        if bounded:
            held = f"{ratio['bound']:g} {'holds' if ratio['holds'] else 'missed'}" if ratio and "bound" in ratio else ""
            cells.append(held)
        table.add_row(*cells, *([f"{memory[name] / 2**20:.0f}"] if memory else []))
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)  # a log has no width of its own, and 80 would cut the names
    console.print(table)
    if any("Megatron" in name for name in record["seconds"]):
        console.print("Megatron-core's attention is unfused on a CPU; the others use torch's SDPA.")
    if not record["equal_losses"]:
        console.print("The losses differ: these figures do not compare the same work.", style="bold red")
