"""How long it takes until something runs: imports, initial weights, the first all-reduce of four ranks."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.launch import Launcher
from gridtron.tools.bench.environment import describe_environment

if TYPE_CHECKING:
    from gridtron.tools.bench.cli import BenchOptions

_FOUR_RANKS = (
    "from gridtron.core.supervise import run_local; from gridtron.tools.bench.start import first_all_reduce; "
    "import torch; raise SystemExit(run_local(first_all_reduce, 4, threads=1))"
)


def run(options: BenchOptions) -> int:
    """Each figure is the median of ``options.pairs`` runs in processes of their own."""
    rounds = max(3, options.pairs // 4)
    figures: dict[str, Any] = {
        "import torch": _processes("import torch", rounds),
        "import torch and gridtron.parallel": _processes("import torch; from gridtron.parallel import *", rounds),
        "first all-reduce of 4 ranks, from the command": _processes(_FOUR_RANKS, rounds),
        "initial weights of GPT-2 124M, one core": _initial_weights(rounds),
    }
    for name, seconds in figures.items():
        print(f"{statistics.median(seconds):7.2f} s  {name}")
    if options.out:
        content = {"environment": describe_environment(), "seconds": figures}
        Path(options.out).expanduser().write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _processes(code: str, rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        seconds.append(time.perf_counter() - start)
    return seconds


def first_all_reduce(launcher: Launcher) -> None:
    """One rank: joins the grid and sums one number."""
    import torch

    from gridtron.core.communication import all_reduce
    from gridtron.core.grid import Grid

    with Grid.create(tensor=-1, launcher=launcher, device="cpu") as grid:
        assert int(all_reduce(torch.ones(1), grid.tensor)) == launcher.world_size


def _initial_weights(rounds: int) -> list[float]:
    import torch

    from gridtron.models import GPT, GPTConfig

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = GPTConfig(
        vocab_size=50257, normalization="layer_norm", position="learned", activation="gelu_tanh", bias=True,
        tie_embeddings=True,
    )  # fmt: skip
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        GPT(config, seed=0)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return seconds
