"""Rank arithmetic, pure: which rank stands where on a grid of any size, and which sizes fit a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gridtron.core.options import option

AXIS_NAMES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class GridConfig:
    data: int = option(-1, "data-parallel size; -1: what is left", minimum=-1)
    pipeline: int = option(1, "pipeline-parallel size; -1: what is left", minimum=-1)
    context: int = option(1, "context-parallel size", minimum=-1)
    tensor: int = option(1, "tensor-parallel size; -1: what is left", minimum=-1)
    order: list[str] = option(list(AXIS_NAMES), "axes from the outermost inwards")
    sequence_parallel: bool = option(
        False, "split norms, dropout and residuals along the sequence; no effect at tensor=1"
    )
    overlap: str = option(
        "none",
        "with sequence_parallel, collectives of the tensor axis behind matrix products: in pieces of the sequence, or "
        "by torch's fused operators over symmetric memory (CUDA); no effect at tensor=1",
        choices=("none", "chunked", "symmetric_memory"),
    )


@dataclass(frozen=True)
class GridSizes:
    """Sizes of the axes and their order, outermost first. Rank arithmetic only."""

    sizes: Mapping[str, int]
    order: tuple[str, ...] = AXIS_NAMES

    @property
    def world_size(self) -> int:
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    def coordinate(self, rank: int) -> dict[str, int]:
        """Place of ``rank`` on every axis, in the grid's order."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is outside this grid of {self.world_size} ranks (0 to {self.world_size - 1})"
            )
        place = {}
        for name in reversed(self.order):
            rank, place[name] = divmod(rank, self.sizes[name])
        return {name: place[name] for name in self.order}

    def rank_at(self, coordinate: Mapping[str, int]) -> int:
        """The rank that stands at ``coordinate``: the inverse of :meth:`coordinate`."""
        rank = 0
        for name in self.order:
            rank = rank * self.sizes[name] + coordinate[name]
        return rank

    def ranks_along(self, names: Sequence[str], rank: int) -> tuple[int, ...]:
        """Global ranks that share every coordinate of ``rank`` but those on ``names``, in the grid's order."""
        place = self.coordinate(rank)
        spread: list[dict[str, int]] = [place]
        for name in self.order:
            if name in names:
                spread = [point | {name: index} for point in spread for index in range(self.sizes[name])]
        return tuple(self.rank_at(point) for point in spread)


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of ``number`` that is nearest to ``wanted``."""
    return min((size for size in range(1, number + 1) if number % size == 0), key=lambda size: abs(size - wanted))


def resolve_sizes(world_size: int, order: Sequence[str] | None = None, **requested: int) -> GridSizes:
    """Sizes of all axes for ``world_size`` ranks: one may be -1 (what is left); data is, unless another is.

    Raises:
        ValueError: naming the sizes, the rule, and the nearest sizes that work.
    """
    order = tuple(AXIS_NAMES if order is None else order)
    if sorted(order) != sorted(AXIS_NAMES):
        raise ValueError(f"order={list(order)} must name each of {list(AXIS_NAMES)} once, outermost first")
    sizes = {name: requested.get(name, -1 if name == "data" else 1) for name in order}
    unknown = set(requested) - set(AXIS_NAMES)
    if unknown:
        raise ValueError(f"unknown axes {sorted(unknown)}; a grid has {list(AXIS_NAMES)}")
    for name, size in sizes.items():
        if size != -1 and size < 1:
            raise ValueError(f"{name}={size}: the size of an axis is at least 1, or -1 for what is left")
    if sizes["context"] > 1:
        raise ValueError(f"context={sizes['context']}: context parallelism is not built yet; set context=1")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1 and "data" in open_axes:
        sizes["data"] = 1
        open_axes.remove("data")
    if len(open_axes) > 1:
        raise ValueError(f"only one axis may be -1 (what is left), and {' and '.join(open_axes)} are")
    given = 1
    for size in sizes.values():
        given *= size if size != -1 else 1
    described = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if open_axes:
        if world_size % given:
            raise ValueError(
                f"{described}: {given} does not divide the {world_size} ranks; {_advice(sizes, world_size)}"
            )
        sizes[open_axes[0]] = world_size // given
        if sizes["context"] > 1:
            raise ValueError(
                f"context=-1 is {sizes['context']} here: context parallelism is not built yet; set context=1"
            )
    elif given != world_size:
        raise ValueError(f"{described} is {given} ranks and there are {world_size}; {_advice(sizes, world_size)}")
    return GridSizes(sizes, order)


def _advice(sizes: Mapping[str, int], world_size: int) -> str:
    """What would fit: the largest divisor of the world at or under the asked size, and the command for more ranks."""
    tensor = max(
        divisor
        for divisor in range(1, world_size + 1)
        if world_size % divisor == 0 and divisor <= max(sizes["tensor"], 1)
    )
    needed = 1
    for size in sizes.values():
        needed *= max(size, 1)
    return (
        f"with {world_size} ranks tensor={tensor} and data=-1 fit, or start {needed} processes "
        f"(torchrun --nproc-per-node {needed} ...)"
    )
