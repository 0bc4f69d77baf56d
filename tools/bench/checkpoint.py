"""Saving and loading a state beside torch.distributed.checkpoint as it comes; and how long training stands still."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.launch import Launcher
from gridtron.core.supervise import run_local
from gridtron.tools.bench.environment import describe_environment

if TYPE_CHECKING:
    from torch import Tensor

    from gridtron.core.grid import Grid
    from gridtron.tools.bench.cli import BenchOptions
    from gridtron.tools.bench.measure import Contender, Ratio


@dataclass(frozen=True)
class State:
    """The tensors of a Llama-like model and AdamW's two moments, in float32, rows over the ranks.

    Args:
        hidden: features; a layer has four square matrices and three of 8/3 the size.
        layers: of them.
        ranks: rows are a multiple of them: DTensor's shares are even.
    """

    hidden: int
    layers: int
    ranks: int = 2

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Global shape of each tensor by name."""
        hidden, wide = (-(-size // self.ranks) * self.ranks for size in (self.hidden, self.hidden * 8 // 3))
        matrices = dict.fromkeys(("q", "k", "v", "out"), (hidden, hidden))
        matrices |= {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
        return {
            f"{prefix}/blocks.{layer}.{name}.weight{suffix}": shape
            for layer in range(self.layers)
            for name, shape in matrices.items()
            for prefix, suffix in (("parameters", ""), ("optimizer", "/exp_avg"), ("optimizer", "/exp_avg_sq"))
        }

    @property
    def nbytes(self) -> int:
        return 4 * sum(rows * columns for rows, columns in self.shapes().values())


STATES = {"full": State(1024, 7), "small": State(512, 7), "tiny": State(48, 2)}

BOUNDS = {"save": 1.1, "load": 1.05, "stall": 0.25}
"""Largest ratio that is allowed, part by part: to DCP's save, to DCP's load, to the save that training waits for."""


def run(options: BenchOptions) -> int:
    """Saves and loads in the working directory's file system, prints a table a part, writes ``options.out``."""
    records: list[dict[str, Any]] = []
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(prefix=".bench-checkpoint-", dir=".") as folder:
            result = Path(folder, "result.json")
            arguments = (shape, options.pairs, options.warmup, folder, str(result))
            code = run_local(_run_rank, options.ranks, arguments, threads=1)
            if code:
                return code
            records += json.loads(result.read_text(encoding="utf-8"))
        for record in records[-len(BOUNDS) :]:
            _show(record)
    if options.out:
        figures = {"environment": describe_environment(), "page_cache": "warm", "sections": records}
        Path(options.out).expanduser().write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def _run_rank(launcher: Launcher, shape: str, pairs: int, warmup: int, folder: str, result: str) -> None:
    import warnings

    import torch

    from gridtron.core.communication import barrier
    from gridtron.core.grid import Grid
    from gridtron.tools.bench import checkpoint_contenders as contenders
    from gridtron.tools.bench.measure import alternate, compare
    from gridtron.tools.bench.sections import RoundsBar

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    records = []
    with Grid.create(tensor=-1, launcher=launcher, device="cpu") as grid:
        state = replace(STATES[shape], ranks=grid.world_size)
        tensors = _tensors(state, grid)
        parts: dict[str, Callable[[], list[Contender]]] = {
            "save": lambda: [contenders.our_save(*given), contenders.their_save(*given)],
            "load": lambda: [contenders.our_load(*given), contenders.their_load(*given)],
            "stall": lambda: [contenders.our_stall(*given), contenders.our_save(*given)],
        }
        given = (state.shapes(), tensors, grid, Path(folder))
        for part, make in parts.items():
            compared = make()
            title = f"{part}: {state.nbytes / 2**20:,.0f} MB over {grid.world_size} ranks"
            with RoundsBar(title, warmup + pairs, grid.rank == 0) as advance:
                seconds, sums = alternate(compared, pairs, warmup, lambda: barrier(grid.tensor), advance)
            ratio = compare(seconds, compared[0].name, compared[1].name)
            records.append(_record(part, title, shape, state, grid, seconds, sums, ratio))
        if grid.rank == 0:
            Path(result).write_text(json.dumps(records), encoding="utf-8")


def _tensors(state: State, grid: Grid) -> dict[str, Tensor]:
    """This rank's rows; numbers that tell tensors, rows and columns apart."""
    import torch

    from gridtron.core.sharding import Sharding

    generator = torch.Generator().manual_seed(grid.rank)
    return {
        name: torch.randn(Sharding.split(shape, 0, grid.world_size).local_shape(grid.rank), generator=generator)
        for name, shape in state.shapes().items()
    }


def _record(
    part: str,
    title: str,
    shape: str,
    state: State,
    grid: Grid,
    seconds: dict[str, list[float]],
    sums: dict[str, list[float]],
    ratio: Ratio,
) -> dict[str, Any]:
    # Sums over what each has read or written: where they are equal, both did the same work.
    return {
        "part": part,
        "title": title,
        "shape": {"name": shape, **asdict(state), "bytes": state.nbytes},
        "ranks": grid.world_size,
        "seconds": seconds,
        "equal_work": len({value for values in sums.values() for value in values}) == 1,
        "ratio": asdict(ratio),
        "bound": BOUNDS[part],
        "holds": ratio.holds(BOUNDS[part]),
    }


def _show(record: dict[str, Any]) -> None:
    import statistics

    from rich.console import Console
    from rich.table import Table

    table = Table(title=record["title"], title_justify="left")
    for column in ("", "seconds", "GB/s", "ratio", "95% interval", "bound"):
        table.add_column(column, justify="left" if not column else "right")
    ratio = record["ratio"]
    for name, seconds in record["seconds"].items():
        middle = statistics.median(seconds)
        cells = [name, f"{middle:.3f}", f"{record['shape']['bytes'] / middle / 1e9:.2f}"]
        if name == ratio["ours"]:
            interval = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
            held = f"{record['bound']} {'holds' if record['holds'] else 'missed'}"
            cells += [f"{ratio['median']:.3f}", interval, held]
        table.add_row(*cells)
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    console.print(table)
    if not record["equal_work"]:
        console.print("The tensors differ: these figures do not compare the same work.", style="bold red")
