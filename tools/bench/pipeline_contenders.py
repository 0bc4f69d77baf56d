"""This GPT through the runner, and the plain module through torch.distributed.pipelining: equal work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridtron.core.grid import Grid
from gridtron.models import GPT
from gridtron.parallel import load_full_state_dict
from gridtron.parallel.pipeline import PipelineRunner, build_schedule
from gridtron.tools.bench.contenders import our_config, our_names
from gridtron.tools.bench.measure import Contender
from gridtron.tools.bench.plain import PlainGPT, Shape, adamw, mean_loss, plain_model, tokens_of


def ours(shape: Shape, grid: Grid, name: str, microbatches: int) -> Contender:
    """This GPT's stages through PipelineRunner."""
    schedule = build_schedule(name, grid.pipeline.size, microbatches)
    model = GPT(our_config(shape), grid, num_stages=schedule.num_stages, placement=schedule.placement, seed=0)
    state = plain_model(shape).state_dict()
    load_full_state_dict(model, {mine: state[theirs] for mine, theirs in our_names(shape).items()}, grid)
    targets: list[Tensor] = []

    def forward(stage: int, module: nn.Module, tensors: Sequence[Tensor], microbatch: int) -> Any:
        last = stage == schedule.num_stages - 1
        return module(*tensors, targets[microbatch]) if last else module(*tensors)

    runner = PipelineRunner(model.stages, schedule, grid.pipeline, forward=forward)
    optimizer = adamw(model.parameters(), shape)
    count = shape.batch * shape.sequence

    def step(index: int) -> float:
        tokens, labels = tokens_of(shape, index)
        targets[:] = labels.chunk(microbatches)
        total = runner.step(tokens.chunk(microbatches), None, count)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return Contender(f"gridtron {name}", step)


def torch_pipelining(shape: Shape, grid: Grid, name: str, microbatches: int) -> Contender:
    """The plain module's stages through torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, schedules

    kinds: dict[str, Any] = {
        "1f1b": schedules.Schedule1F1B,
        "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
        "zb_v": schedules.ScheduleZBVZeroBubble,
    }
    rank, ranks = grid.pipeline.rank, grid.pipeline.size
    count = ranks if name == "1f1b" else 2 * ranks
    held = {"1f1b": [rank], "interleaved_1f1b": [rank, rank + ranks], "zb_v": [rank, count - 1 - rank]}[name]
    modules = [stage_of(plain_model(shape), stage, count) for stage in held]
    stages = [
        PipelineStage(module, stage, count, torch.device("cpu")) for module, stage in zip(modules, held, strict=True)
    ]
    schedule = kinds[name](stages[0] if name == "1f1b" else stages, n_microbatches=microbatches, loss_fn=mean_loss)
    optimizer = adamw([parameter for module in modules for parameter in module.parameters()], shape)
    first, last = 0 in held, count - 1 in held

    def step(index: int) -> float:
        tokens, labels = tokens_of(shape, index)
        losses: list[Tensor] = []
        given = (tokens,) if first else ()
        schedule.step(*given, **({"target": labels, "losses": losses} if last else {}), return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if last else 0.0

    return Contender(f"torch {name}", step, share_from(_holder(grid, last)))


def _holder(grid: Grid, here: bool) -> int:
    """The rank for which ``here`` is true."""
    found = torch.tensor(grid.rank if here else 0)
    dist.all_reduce(found)
    return int(found)


def share_from(source: int) -> Callable[[float], float]:
    """What one rank knows, on all; outside the timed part."""

    def share(value: float) -> float:
        box = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(box, source)
        return float(box)

    return share


def stage_of(model: PlainGPT, stage: int, count: int) -> nn.Module:
    """One of ``count`` equal slices of the layers, the embedding on the first and the head on the last."""
    each = len(model.layers) // count
    part: Any = model
    for name in list(model.layers):
        if int(name) // each != stage:
            del model.layers[name]
    if stage > 0:
        part.tok = nn.Identity()
    if stage < count - 1:
        part.norm = part.head = nn.Identity()
    return model
