"""The norm of the whole gradient, every parameter counted once whatever the grid, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gridtron.core.communication import all_reduce
from gridtron.core.grid import Axis
from gridtron.core.sharding import Sharding
from gridtron.core.torch_compat import norms_of, scale_


@dataclass(frozen=True)
class Held:
    """A gradient's local rows and how they lie over which axis."""

    gradient: Tensor
    sharding: Sharding
    axis: Axis


def gradient_norm(held: Sequence[Held], axes: Sequence[Axis], device: torch.device | None = None) -> Tensor:
    """Euclidean norm of all gradients, a scalar in float64, equal on every rank.

    Each rank adds the squares of the rows it owns: rows that several ranks hold count on the lowest, a whole parameter
    counts on rank 0. A non-finite gradient on any rank makes the norm non-finite on all.

    Args:
        held: gradients after every sum, so that replicas agree.
        axes: the axes over which parameters are split: tensor and pipeline.
        device: of the result, where this rank may hold no gradient; default: that of the gradients.
    """
    if device is None:
        device = held[0].gradient.device if held else torch.device("cpu")
    pieces = [piece for item in held for piece in _owned(item)]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if pieces:
        norms = norms_of(pieces)
        total += torch.stack([norm.double() for norm in norms]).square().sum()
    for axis in axes:
        all_reduce(total, axis)
    return total.sqrt()


def _owned(item: Held) -> list[Tensor]:
    sharding, rank = item.sharding, item.axis.rank
    if sharding.dim is None:
        return [item.gradient] if rank == 0 else []
    if not sharding.shared():
        return [item.gradient] if item.gradient.numel() else []
    return [
        item.gradient.narrow(sharding.dim, low, high - low)
        for _, (low, high) in sharding.local_slices(rank, sharding.owned(rank))
    ]


def clip_(held: Sequence[Held], norm: Tensor, limit: float) -> None:
    """In place: scales all gradients so that their norm is at most ``limit``; nothing where it is already."""
    if norm <= limit or not held:
        return
    scale_([item.gradient for item in held], float(limit / norm))
