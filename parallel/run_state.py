"""Every tensor of an engine's state under its grid-independent name, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.errors import JobError
from gridtron.core.grid import Axis
from gridtron.core.pieces import Piece
from gridtron.core.sharding import Sharding
from gridtron.parallel.data_parallel.fsdp import is_cut, local_part
from gridtron.parallel.parameters import NamedParameter

if TYPE_CHECKING:
    from gridtron.parallel.engine import TrainingEngine


def run_state(engine: TrainingEngine) -> dict[str, ShardedTensorView]:
    """Views of an engine's tensors: what a checkpoint reads, and fills in place."""
    engine.optimizer.make_states()
    views: dict[str, ShardedTensorView] = {}
    states = engine.optimizer.states()
    for item in engine.parameters:
        piece = engine.pieces[item.name]
        part, narrow = _weights(engine, item)
        views[f"parameters/{item.name}"] = _view(engine, item, part if narrow is None else narrow, piece)
        tensors = states.get(item.name, {})
        if narrow is not None and item.parameter.requires_grad:
            # The wide weights are the parameter itself; elsewhere they stand beside it, under this name.
            tensors = {**tensors, "main": part}
        for key, tensor in tensors.items():
            views[f"optimizer/{item.name}/{key}"] = _view(engine, item, tensor, piece, key)
    if engine.scaler is not None:
        for key, tensor in engine.scaler.states().items():
            whole = Sharding.whole(tuple(tensor.shape))
            views[f"precision/{key}"] = ShardedTensorView(tensor, whole, 0, engine.grid.rank)
    return views


def _weights(engine: TrainingEngine, item: NamedParameter) -> tuple[Tensor, Tensor | None]:
    """(the parameter as this rank keeps it, its rounded copy where only wide weights are kept)."""
    if not is_cut(item.parameter):
        return item.parameter.detach(), None
    part = local_part(item.parameter)
    return part, None if engine.dtype is None else part.to(engine.dtype)


def _view(
    engine: TrainingEngine, item: NamedParameter, tensor: Tensor, piece: Piece, key: str | None = None
) -> ShardedTensorView:
    """A state as large as what this rank keeps of the parameter lies like it; a counter is whole on every rank."""
    rank = item.axis.rank
    shape = tuple(tensor.shape)
    if piece.cuts is not None and shape == piece.shape and (key is not None or is_cut(item.parameter)):
        return ShardedTensorView(
            tensor, item.sharding, rank, _replica(engine.model.replicas, item, item.sharding), piece
        )
    if shape == piece.local_shape:
        return ShardedTensorView(tensor, item.sharding, rank, _replica(engine.data_axis, item, item.sharding))
    split = piece.cuts is not None or (item.axis.size > 1 and item.sharding.dim is not None)
    if key is not None and split and tensor.numel() > 1:
        raise JobError(
            f"optimizer state {key} of {item.name} has the shape {shape}, what this rank updates of the parameter "
            f"{piece.shape}: over grid.tensor={item.axis.size} and data_parallel.zero={engine.model.zero} only states "
            "like the parameter, and single numbers, can be saved; use grid.tensor=1 "
            f"{'and data_parallel.zero=0 ' if engine.model.zero else ''}with this optimizer",
            agreed=True,
        )
    whole = Sharding.whole(shape)
    return ShardedTensorView(tensor, whole, rank, _replica(engine.data_axis, item, whole))


def _replica(replicas: Axis, item: NamedParameter, sharding: Sharding) -> int:
    """Which of the ranks with the same rows this one is: over ``replicas``, over stages that share the parameter, and
    over the tensor axis where each rank of it holds the whole."""
    number = replicas.rank
    for axis in (item.copies, item.axis if sharding.dim is None else None):
        if axis is not None:
            number = number * axis.size + axis.rank
    return number


def take_run_state(engine: TrainingEngine, state: Mapping[str, ShardedTensorView]) -> None:
    """After the views of :func:`run_state` were filled: what keeps copies of its own takes them up."""
    for item, view in _frozen_copies(engine, state):
        local_part(item.parameter).copy_(view.local)
    engine.optimizer.take_states()
    if engine.scaler is not None:
        engine.scaler.take_states()


def _frozen_copies(
    engine: TrainingEngine, state: Mapping[str, ShardedTensorView]
) -> Iterator[tuple[NamedParameter, ShardedTensorView]]:
    """Frozen parameters that are kept wider than they are saved: their rounded copies were filled, not they."""
    for item in engine.parameters:
        if engine.dtype is not None and is_cut(item.parameter) and not item.parameter.requires_grad:
            yield item, state[f"parameters/{item.name}"]
