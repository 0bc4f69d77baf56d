"""This GPT under each stage of ZeRO, and the plain module under torch's ways to the same: equal work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridtron.core.grid import Grid
from gridtron.models import GPT
from gridtron.parallel import DataParallel, load_full_state_dict
from gridtron.tools.bench.contenders import our_config, our_names
from gridtron.tools.bench.measure import Contender
from gridtron.tools.bench.plain import Shape, adamw, mean_loss, plain_model, tokens_of


def ours(shape: Shape, grid: Grid, zero: int) -> Contender:
    """This GPT in DataParallel."""
    model = GPT(our_config(shape), grid, seed=0)
    state = plain_model(shape).state_dict()
    load_full_state_dict(model, {name: state[theirs] for name, theirs in our_names(shape).items()})
    wrapped = DataParallel(model, grid.data, zero=zero)
    optimizer = adamw(wrapped.optimizer_parameters(), shape)
    count = shape.batch * shape.sequence

    def step(index: int) -> float:
        loss = wrapped(*_share(shape, index, grid)).sum() / count
        loss.backward()
        wrapped.finish_step()
        optimizer.step()
        wrapped.zero_grad()
        return float(loss.detach())

    return Contender(f"gridtron zero={zero}", step, _sum_over(1))


def replicated(shape: Shape, grid: Grid) -> Contender:
    """The plain module in DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(plain_model(shape))
    return _contender("DDP", shape, grid, model, [adamw(model.parameters(), shape)])


def redundancy_free(shape: Shape, grid: Grid) -> Contender:
    """The same with the optimizer's states cut by ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(plain_model(shape))
    options: dict[str, Any] = {"lr": shape.lr, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **options)
    return _contender("DDP + ZeroRedundancyOptimizer", shape, grid, model, [optimizer])


def fully_sharded(shape: Shape, grid: Grid) -> Contender:
    """The plain module, each layer and the whole wrapped by FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain_model(shape)
    mesh = init_device_mesh("cpu", (grid.data.size,), mesh_dim_names=("dp",))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    wrapped: Any = fully_shard(model, mesh=mesh)
    return _contender("FSDP2", shape, grid, wrapped, [adamw(wrapped.parameters(), shape)])


def _contender(
    name: str, shape: Shape, grid: Grid, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Contender:
    def step(index: int) -> float:
        tokens, targets = _share(shape, index, grid)
        loss = mean_loss(model(tokens), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    return Contender(name, step, _sum_over(grid.data.size))


def _share(shape: Shape, index: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """This rank's samples of a step."""
    tokens, targets = (t.chunk(grid.data.size)[grid.data.rank] for t in tokens_of(shape, index))
    return tokens, targets


def _sum_over(divisor: int) -> Callable[[float], float]:
    """The loss of all ranks from each one's, outside of the timed part."""

    def share(value: float) -> float:
        box = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(box)
        return float(box) / divisor

    return share
