"""The norm of the whole gradient, every parameter counted once whatever the grid, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gridtron.core.communication import all_reduce
from gridtron.core.grid import Axis
from gridtron.core.pieces import Piece
from gridtron.core.torch_compat import norms_of, scale_


@dataclass(frozen=True)
class Held:
    """The gradient of what this rank updates of a parameter, and where that lies in the whole."""

    gradient: Tensor
    piece: Piece


def gradient_norm(
    held: Sequence[Held], axes: Sequence[Axis], device: torch.device | None = None, shards: Axis | None = None
) -> Tensor:
    """Euclidean norm of all gradients, a scalar in float64, equal on every rank.

    Each rank adds the squares of the numbers it owns: rows that several ranks hold count on the lowest, a whole
    parameter counts on rank 0, a flat range where it is updated. A non-finite gradient on any rank makes the norm
    non-finite on all.

    Args:
        held: gradients after every sum, so that replicas agree.
        axes: the axes over which parameters are split: tensor and pipeline.
        device: of the result, where this rank may hold no gradient; default: that of the gradients.
        shards: the ranks over which flat ranges are cut, where some are: one that is not cut counts on the first.
    """
    if device is None:
        device = held[0].gradient.device if held else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    squares = _squares(held, shards)
    if squares:
        total += torch.stack(squares).sum()
    for axis in [*axes, *([shards] if shards else [])]:
        all_reduce(total, axis)
    return total.sqrt()


def norms_by_name(
    held: Mapping[str, Held],
    names: Sequence[str],
    axes: Sequence[Axis],
    device: torch.device | None = None,
    shards: Axis | None = None,
) -> dict[str, float]:
    """Euclidean norm of each parameter's gradient, equal on every rank, by one reduction for all an axis.

    Args:
        held: by name, those of this rank that count: of a weight on several stages, the first one's.
        names: of all parameters of all stages, the same list on every rank. 0.0 where no rank has a gradient.
        axes, device, shards: as for :func:`gradient_norm`.
    """
    if device is None:
        device = next((item.gradient.device for item in held.values()), torch.device("cpu"))
    place = {name: index for index, name in enumerate(names)}
    assert held.keys() <= place.keys(), sorted(held.keys() - place.keys())
    total = torch.zeros(len(place), dtype=torch.float64, device=device)
    counted = [name for name, item in held.items() for _ in _owned(item, shards)]
    squares = _squares(list(held.values()), shards)
    if squares:
        where = torch.tensor([place[name] for name in counted], device=device)
        total.index_add_(0, where, torch.stack(squares))
    for axis in [*axes, *([shards] if shards else [])]:
        all_reduce(total, axis)
    return dict(zip(place, total.sqrt().tolist(), strict=True))


def layer_of(name: str) -> str:
    """The layer of a parameter: its name to the first number ("blocks.3"), else that of its module."""
    words = name.split(".")
    numbered = [place for place, word in enumerate(words[:-1]) if word.isdigit()]
    return ".".join(words[: numbered[0] + 1] if numbered else words[:-1]) or name


def norms_by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Norms of layers from those of their parameters."""
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + norm * norm
    return {name: math.sqrt(square) for name, square in squares.items()}


def _squares(held: Sequence[Held], shards: Axis | None) -> list[Tensor]:
    """The square of the norm of each part that counts on this rank, in float64."""
    parts = [part for item in held for part in _owned(item, shards)]
    return [norm.double().square() for norm in norms_of(parts)] if parts else []


def _owned(item: Held, shards: Axis | None) -> list[Tensor]:
    """The parts of a gradient that count on this rank; none of them is empty."""
    piece, gradient = item.piece, item.gradient
    if piece.cuts is None and shards is not None and shards.rank != 0:
        return []
    counted = piece.counted()
    flat = gradient.reshape(-1)
    parts = [flat] if counted is None else [flat[start:stop] for start, stop in counted]
    return [part for part in parts if part.numel()]


def clip_(held: Sequence[Held], norm: Tensor, limit: float) -> None:
    """In place: scales all gradients so that their norm is at most ``limit``; nothing where it is already."""
    if norm <= limit or not held:
        return
    scale_([item.gradient for item in held], float(limit / norm))
