"""A run whose model is seven numbers and no layer: for tests of the loop, the launcher and checkpoints around it.

The weights are split unevenly over the tensor axis; the gradient comes from the tokens of the global batch. Everything
is float64. ``TOY_FAULT=WHERE:RANK:STEP`` makes one rank fail at one step; ``TOY_DELAY=SECONDS`` makes steps slow;
``TOY_WIDTH`` is the number of weights.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.communication import all_reduce
from gridtron.core.data.batch import Batch
from gridtron.core.data.stream import EvaluationStream, TrainingStream
from gridtron.core.grid import Grid
from gridtron.core.sharding import Sharding
from gridtron.core.training.metrics import read_rows
from gridtron.core.training.protocols import LossSum, StepOutcome

SAMPLES = 40
SMALL = (
    "train.steps=6",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.sequence_length=4",
    "logging.tensorboard=false",
)
"""A run of six steps of the toy, on the command line."""


def width() -> int:
    """Number of weights."""
    return int(os.environ.get("TOY_WIDTH", "7"))


class Source:
    """Forty samples; sample i repeats the token i."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return SAMPLES

    def samples(self, indices: Any) -> Any:
        tokens = np.repeat(np.asarray(indices, dtype=np.int64)[:, None], self.length + 1, axis=1)
        return tokens, np.zeros_like(tokens)


def fault(where: str, rank: int, step: int) -> None:
    wanted = os.environ.get("TOY_FAULT", "").split(":")
    if wanted[:3] != [where, str(rank), str(step)]:
        return
    if wanted[3:] == ["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if wanted[3:] == ["exit"]:
        os._exit(5)
    raise KeyError(f"planted in {where}")


class ToyEngine:
    """Momentum descent on 0.05 w^2 - w g, where g is the mean token of the global batch."""

    def __init__(self, grid: Grid):
        self.grid = grid
        self.sharding = Sharding.split((width(),), 0, grid.tensor.size)
        rows = [row for a, b in self.sharding.ranges(grid.tensor.rank) for row in range(a, b)]
        self.weight = torch.tensor([1.0 + row for row in rows], dtype=torch.float64)
        self.momentum = torch.zeros_like(self.weight)
        self.gradient = torch.zeros_like(self.weight)
        self.steps = 0

    def _sum(self, value: torch.Tensor, axis: Any) -> torch.Tensor:
        value = value.clone()
        all_reduce(value, axis)
        return value

    def forward_backward(self, microbatches: Sequence[Batch]) -> LossSum:
        time.sleep(float(os.environ.get("TOY_DELAY", "0")))
        self.steps += 1
        fault("step", self.grid.rank, self.steps)
        sums = torch.tensor([sum(float(b.tokens.sum()) for b in microbatches), sum(b.count for b in microbatches)])
        total, count = self._sum(sums.double(), self.grid.data).tolist()
        self.gradient = 0.1 * self.weight - (total / count if count else 0.0)
        loss = self._sum((self.weight**2).sum(), self.grid.tensor).item()
        return LossSum(loss, int(count))

    def step(self, lr: float) -> StepOutcome:
        norm = self._sum((self.gradient**2).sum(), self.grid.tensor).item() ** 0.5
        self.momentum = 0.9 * self.momentum + self.gradient
        self.weight = self.weight - lr * self.momentum
        return StepOutcome(norm, True)

    def evaluate(self, batches: Iterable[Batch]) -> LossSum:
        count = torch.tensor(float(sum(batch.count for batch in batches)))
        return LossSum(
            self._sum((self.weight**2).sum(), self.grid.tensor).item(), int(self._sum(count, self.grid.data).item())
        )

    def state_dict(self) -> Mapping[str, ShardedTensorView]:
        fault("save", self.grid.rank, self.steps)
        return {
            name: ShardedTensorView(tensor, self.sharding, self.grid.tensor.rank, self.grid.data.rank)
            for name, tensor in (("parameters/w", self.weight), ("optimizer/w/momentum", self.momentum))
        }

    def load_state_dict(self, state: Mapping[str, ShardedTensorView]) -> None:
        self.weight = state["parameters/w"].local
        self.momentum = state["optimizer/w/momentum"].local


class FaultyStream(TrainingStream):
    """Training data that fails where it is told to."""

    rank = 0
    reads = 0

    def microbatches(self, position: int) -> list[Batch]:
        self.reads += 1
        fault("data", self.rank, self.reads)
        return super().microbatches(position)


@dataclass
class Assembly:
    engine: ToyEngine
    training: TrainingStream
    evaluation: EvaluationStream | None
    flops_per_token: float = 42.0
    peak_flops: float | None = 1e9
    environment: dict[str, Any] = field(default_factory=lambda: {"data": [{"file": "toy", "bytes": 40}]})


def assemble(plan: Any, grid: Grid, directory: Path) -> Assembly:
    fault("assemble", grid.rank, 0)
    train, data = plan.train, grid.data
    source = Source(train.sequence_length)
    stream = FaultyStream(source, train.seed, train.global_batch_size, train.micro_batch_size, data.rank, data.size)
    stream.rank = grid.rank
    evaluation = None
    if plan.evaluation.every:
        evaluation = EvaluationStream(
            source, train.global_batch_size, train.micro_batch_size, plan.evaluation.steps, data.rank, data.size
        )
    return Assembly(ToyEngine(grid), stream, evaluation)


def rows(tmp_path: Path, name: str = "run") -> list[dict[str, Any]]:
    """Rows of training steps of the run ``name``."""
    return [row for row in read_rows(tmp_path / name / "metrics.jsonl") if "grad_norm" in row]


def losses(tmp_path: Path, name: str = "run") -> list[tuple[int, float]]:
    """Its losses by step."""
    return [(row["step"], row["loss"]) for row in rows(tmp_path, name)]


def module() -> types.ModuleType:
    """A stand-in for gridtron.tools.assemble."""
    made = types.ModuleType("gridtron.tools.assemble")
    made.assemble = assemble  # type: ignore[attr-defined]
    return made


if __name__ == "__main__":
    sys.modules["gridtron.tools.assemble"] = module()
    from gridtron.tools import arguments
    from gridtron.tools.train import main

    arguments.check_data = lambda plan: None
    time.sleep(float(os.environ.get("TOY_LATE", "0")) * int(os.environ.get("RANK", "0")))
    sys.exit(main(sys.argv[1:]))
