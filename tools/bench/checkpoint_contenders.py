"""This project's checkpoints and torch.distributed.checkpoint's, of the same tensors on the same ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gridtron.core.checkpoint.layout import step_path
from gridtron.core.checkpoint.load import load
from gridtron.core.checkpoint.save import save
from gridtron.core.checkpoint.saver import Saver
from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.communication import barrier, gather_values
from gridtron.core.grid import Grid
from gridtron.core.sharding import Sharding
from gridtron.tools.bench.measure import Contender

Shapes = Mapping[str, tuple[int, int]]


def our_save(shapes: Shapes, tensors: Mapping[str, Tensor], grid: Grid, folder: Path) -> Contender:
    """Written aside, checksums taken, fsynced, renamed."""
    state = _views(shapes, tensors, grid)

    def step(index: int) -> float:
        save(step_path(folder / "ours", index), state, {"step": index}, grid)
        return 0.0

    return Contender("gridtron", step, _cleared(folder / "ours", tensors, grid))


def their_save(shapes: Shapes, tensors: Mapping[str, Tensor], grid: Grid, folder: Path) -> Contender:
    """DCP's own writer with its defaults, which fsync its files."""
    import torch.distributed.checkpoint as dcp

    state = _distributed(tensors)

    def step(index: int) -> float:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "theirs"))
        return 0.0

    return Contender("DCP", step, _cleared(folder / "theirs", tensors, grid))


def our_stall(shapes: Shapes, tensors: Mapping[str, Tensor], grid: Grid, folder: Path) -> Contender:
    """What training waits for when a thread writes; that is waited for outside of the timed part."""
    state = _views(shapes, tensors, grid)
    saver = Saver(grid, asynchronous=True)
    clear = _cleared(folder / "behind", tensors, grid)

    def step(index: int) -> float:
        saver.save(step_path(folder / "behind", index), state, {"step": index})
        return 0.0

    def share(value: float) -> float:
        saver.wait()
        return clear(value)

    return Contender("gridtron in the background", step, share)


def our_load(shapes: Shapes, tensors: Mapping[str, Tensor], grid: Grid, folder: Path) -> Contender:
    """Into tensors that are there, every checksum verified."""
    path = step_path(folder / "to-load", 1)
    save(path, _views(shapes, tensors, grid), {}, grid)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    state = _views(shapes, target, grid)

    def step(index: int) -> float:
        load(path, state, grid)
        return 0.0

    return Contender("gridtron", step, _emptied(target, grid))


def their_load(shapes: Shapes, tensors: Mapping[str, Tensor], grid: Grid, folder: Path) -> Contender:
    """DCP's own reader with its defaults, into tensors that are there."""
    import torch.distributed.checkpoint as dcp

    dcp.save(_distributed(tensors), storage_writer=dcp.FileSystemWriter(folder / "theirs-to-load"))
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    state = _distributed(target)

    def step(index: int) -> float:
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "theirs-to-load"))
        return 0.0

    return Contender("DCP", step, _emptied(target, grid))


def _views(shapes: Shapes, tensors: Mapping[str, Tensor], grid: Grid) -> dict[str, ShardedTensorView]:
    return {
        name: ShardedTensorView(tensor, Sharding.split(shapes[name], 0, grid.world_size), grid.rank)
        for name, tensor in tensors.items()
    }


def _distributed(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) for name, tensor in tensors.items()}


def _cleared(folder: Path, tensors: Mapping[str, Tensor], grid: Grid) -> Callable[[float], float]:
    """After a save: how many bytes of data it left, in full; then nothing of it is left, on the disk either."""
    expected = sum(gather_values(sum(tensor.nbytes for tensor in tensors.values()), grid.tensor))

    def share(_: float) -> float:
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        barrier(grid.tensor)
        if grid.rank == 0:
            shutil.rmtree(folder)
            os.sync()
        barrier(grid.tensor)
        return float(written >= expected)

    return share


def _emptied(target: Mapping[str, Tensor], grid: Grid) -> Callable[[float], float]:
    """After a load: the sum of what was read; then the tensors are zeros again."""

    def share(_: float) -> float:
        found = sum(float(tensor.sum(dtype=torch.float64)) for tensor in target.values())
        for tensor in target.values():
            tensor.zero_()
        return sum(gather_values(found, grid.tensor))

    return share
