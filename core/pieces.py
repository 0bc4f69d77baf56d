"""The part of a parameter that one rank updates: its rows over the tensor axis, cut in flat ranges over data ranks.

Two cuts compose. :class:`Sharding` says which rows of the whole parameter a tensor rank holds; ZeRO (Rajbhandari et al.
2020, arXiv:1910.02054) cuts those rows, flattened, into one contiguous range a data rank. Everything that has to know
where a number lies (norm, checkpoint, the whole matrix of an optimizer) asks a :class:`Piece`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from gridtron.core.communication import all_gather_uneven
from gridtron.core.grid import Axis
from gridtron.core.sharding import Ranges, Sharding

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangular part of a tensor."""


@dataclass(frozen=True)
class Piece:
    """Where the part of a parameter that this rank updates lies in the whole.

    Args:
        sharding: the global shape, and the rows of every rank of ``axis``.
        axis: over which rows are split: the tensor axis.
        cuts: of every rank of ``shards``, the half-open range of the flattened local rows that it updates: disjoint, in
            order, together all of them; some may be empty. None: every rank updates all local rows.
        shards: the ranks over which they are cut.
        matrix: it is the weight of a hidden product, which an optimizer may treat as a matrix; embeddings, heads, norms
            and biases are not.
    """

    sharding: Sharding
    axis: Axis = field(default_factory=lambda: Axis("tensor"))
    cuts: tuple[Range, ...] | None = None
    shards: Axis = field(default_factory=lambda: Axis("data"))
    matrix: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's rows, before they are cut."""
        return self.sharding.local_shape(self.axis.rank)

    @property
    def flat(self) -> Range | None:
        """The range of the flattened local rows that this rank updates; None: all, in their own shape."""
        return None if self.cuts is None else self.cuts[self.shards.rank]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that this rank updates: one-dimensional where the rows are cut."""
        return self.local_shape if self.flat is None else (self.flat[1] - self.flat[0],)

    def take(self, local: Tensor) -> Tensor:
        """This rank's part of its rows: a view."""
        return local if self.flat is None else local.view(-1)[self.flat[0] : self.flat[1]]

    def gather(self, part: Tensor) -> Tensor:
        """This rank's rows from the parts of all ranks of ``shards``, every one of which calls it."""
        if self.cuts is None:
            return part
        lengths = [stop - start for start, stop in self.cuts]
        return self.join(all_gather_uneven(part, lengths, self.shards))

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """This rank's rows from the parts that ranks of ``shards`` update, in their order."""
        if self.cuts is None or self.shards.size == 1:
            return pieces[0].view(self.local_shape)
        flat = pieces[0].new_empty(math.prod(self.local_shape))
        for (start, stop), piece in zip(self.cuts, pieces, strict=True):
            flat[start:stop] = piece
        return flat.view(self.local_shape)

    def gather_whole(self, part: Tensor) -> Tensor:
        """The whole parameter from the parts of all ranks of ``shards`` and ``axis``, every one of which calls it."""
        return gather_whole(self.gather(part), self.sharding, self.axis)

    def take_of_whole(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter."""
        return self.take(take_rows(whole, self.sharding, self.axis.rank).contiguous())

    def counted(self) -> list[Range] | None:
        """Ranges of this rank's part, flattened, that count here in a norm, so that the sum over ``axis`` and
        ``shards`` has each number once; None: all of it."""
        return self._counted

    @cached_property
    def _counted(self) -> list[Range] | None:
        # Asked at every step, and a search over all ranks' rows.
        sharding, rank = self.sharding, self.axis.rank
        if sharding.dim is None:
            return None if rank == 0 else []
        if not sharding.shared():
            return None
        local = sharding.local_slices(rank, sharding.owned(rank))
        return list(self._flat_ranges([low_high for _, low_high in local]))

    def _flat_ranges(self, local: Sequence[Range]) -> Iterator[Range]:
        """Local ranges along the split dimension, as ranges of this rank's flattened part."""
        dim, shape = self.sharding.dim, self.local_shape
        assert dim is not None
        inner = math.prod(shape[dim + 1 :])
        start, stop = self.flat or (0, math.prod(shape))
        for outer in range(math.prod(shape[:dim])):
            for low, high in local:
                base = outer * shape[dim] * inner
                first, last = max(start, base + low * inner), min(stop, base + high * inner)
                if first < last:
                    yield first - start, last - start

    def boxes(self, ranges: Sequence[Range] | None = None) -> list[tuple[Box, Range]]:
        """The part, or ``ranges`` of it, as rectangles of the whole parameter: (offsets, sizes) and the range of the
        flattened part.

        A flat range of a matrix is at most three: the end of a row, whole rows, the beginning of a row. Rows that lie
        apart in the whole are apart here.
        """
        start, stop = self.flat or (0, math.prod(self.local_shape))
        found: list[tuple[Box, Range]] = []
        for low, high in [(0, stop - start)] if ranges is None else ranges:
            for offsets, sizes, place in rectangles(self.local_shape, start + low, start + high):
                found += self._global_boxes(offsets, sizes, place - start)
        return found

    def _global_boxes(
        self, offsets: tuple[int, ...], sizes: tuple[int, ...], place: int
    ) -> Iterator[tuple[Box, Range]]:
        """A contiguous local rectangle, split where its rows lie apart in the whole."""
        dim, numel = self.sharding.dim, math.prod(sizes)
        ranges: Ranges = self.sharding.ranges(self.axis.rank)
        if dim is None or len(ranges) == 1:
            shift = 0 if dim is None else ranges[0][0]
            moved = tuple(o + shift if d == dim else o for d, o in enumerate(offsets))
            yield (moved, sizes), (place, place + numel)
            return
        # Contiguous pieces only: one for each index of the dimensions before the split one, and each run of rows.
        inner = math.prod(sizes[dim + 1 :])
        for outer in range(math.prod(sizes[:dim])):
            lead = _unravel(outer, sizes[:dim])
            first = 0
            for low, high in ranges:
                a, b = max(offsets[dim], first), min(offsets[dim] + sizes[dim], first + high - low)
                if a < b:
                    begin = place + (outer * sizes[dim] + a - offsets[dim]) * inner
                    before = tuple(o + i for o, i in zip(offsets[:dim], lead, strict=True))
                    where = (*before, low + a - first, *offsets[dim + 1 :])
                    yield (where, (*([1] * dim), b - a, *sizes[dim + 1 :])), (begin, begin + (b - a) * inner)
                first += high - low


def take_rows(whole: Tensor, sharding: Sharding, rank: int) -> Tensor:
    """A rank's share of a whole tensor."""
    if sharding.dim is None:
        return whole
    pieces = [whole.narrow(sharding.dim, start, stop - start) for start, stop in sharding.ranges(rank)]
    if len(pieces) == 1:
        return pieces[0]
    import torch

    return torch.cat(pieces, sharding.dim) if pieces else whole.narrow(sharding.dim, 0, 0)


def gather_whole(local: Tensor, sharding: Sharding, axis: Axis) -> Tensor:
    """The whole tensor from every rank's rows, on every rank."""
    if sharding.dim is None or axis.size == 1:
        return local
    lengths = [sharding.local_shape(rank)[sharding.dim] for rank in range(axis.size)]
    return join_rows(all_gather_uneven(local, lengths, axis, sharding.dim), sharding)


def join_rows(rows: Sequence[Tensor], sharding: Sharding) -> Tensor:
    """The whole tensor from the rows of all ranks, in their order."""
    dim = sharding.dim
    if dim is None:
        return rows[0]
    whole = rows[0].new_empty(sharding.shape)
    for rank, piece in enumerate(rows):
        for (start, stop), (low, high) in sharding.local_slices(rank, ((0, sharding.shape[dim]),)):
            whole.narrow(dim, start, stop - start).copy_(piece.narrow(dim, low, high - low))
    return whole


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """A flat range of a tensor as rectangles that are contiguous in it: (offsets, sizes, flat start)."""
    if start >= stop:
        return
    if not shape:
        yield (), (), start
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        index = start // row
        yield from _in_row(shape, index, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *([0] * (len(shape) - 1))), (last - first, *shape[1:]), first * row
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    base = index * math.prod(shape[1:])
    for offsets, sizes, low in rectangles(shape[1:], start - base, stop - base):
        yield (index, *offsets), (1, *sizes), low + base


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        index, here = divmod(index, size)
        place.append(here)
    return tuple(reversed(place))
