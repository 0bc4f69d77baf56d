"""Which rows of a parameter each rank owns: one frozen value, from which everything else is derived.

Initialisation, the sum of gradients among holders, the multiplicity in a norm, the writer of each row in a
checkpoint: none of them is set by hand, all are functions of :class:`Sharding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

Ranges = tuple[tuple[int, int], ...]
"""Half-open, increasing, disjoint: ((0, 4), (8, 12))."""


@dataclass(frozen=True)
class Sharding:
    """How one parameter lies over one axis.

    Args:
        shape: the global shape.
        dim: the dimension that is split; None: every rank holds the whole.
        rows: per rank of the axis, the global ranges it holds along ``dim``, in the order of its local tensor.
            Ranges of different ranks may overlap: a KV head is held by every rank whose query heads need it.
        partial: each rank's gradient is only its part of the sum (a norm that saw its share of the sequence).
        name: the grid-independent name, where the part that made the value knows it; else given by the module path.
        tied_to: the name of the parameter whose values these are (a head that is the embedding).
    """

    shape: tuple[int, ...]
    dim: int | None = None
    rows: tuple[Ranges, ...] = ()
    partial: bool = False
    name: str | None = None
    tied_to: str | None = None

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        assert 0 <= self.dim < len(self.shape), (self.dim, self.shape)
        length, held = self.shape[self.dim], set()
        for ranges in self.rows:
            for start, stop in ranges:
                assert 0 <= start < stop <= length, f"range {start}:{stop} outside 0:{length}"
                held.add((start, stop))
            assert all(a[1] <= b[0] for a, b in pairwise(ranges)), f"ranges {ranges} overlap or are out of order"
        covered = 0
        for start, stop in sorted(held):
            assert start <= covered, f"rows {covered}:{start} are held by no rank"
            covered = max(covered, stop)
        assert covered == length, f"rows {covered}:{length} are held by no rank"

    @staticmethod
    def whole(shape: Sequence[int], partial: bool = False) -> Sharding:
        """Every rank holds the whole parameter."""
        return Sharding(tuple(shape), partial=partial)

    @staticmethod
    def split(shape: Sequence[int], dim: int, ranks: int) -> Sharding:
        """Split evenly along ``dim``, the first ranks one row longer where it does not divide."""
        return Sharding(tuple(shape), dim, tuple(nonempty(r) for r in even_ranges(shape[dim], ranks)))

    def named(self, name: str) -> Sharding:
        return replace(self, name=name)

    def ranges(self, rank: int) -> Ranges:
        """Global ranges along ``dim`` that ``rank`` holds; the whole first dimension if it is not split."""
        if self.dim is None:
            return ((0, self.shape[0]),) if self.shape else ()
        return self.rows[rank]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        length = sum(stop - start for start, stop in self.rows[rank])
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def owned(self, rank: int) -> Ranges:
        """The part of ``rank``'s ranges that no lower rank holds: counted here in a norm, written here to a checkpoint.

        A whole parameter is owned by rank 0.
        """
        if self.dim is None:
            return self.ranges(0) if rank == 0 else ()
        own = list(self.rows[rank])
        for lower in self.rows[:rank]:
            for taken in lower:
                own = [piece for held in own for piece in _without(held, taken)]
        return tuple(own)

    def shared(self) -> Ranges:
        """Ranges along ``dim`` that more than one rank holds: their gradients are summed among the holders."""
        if self.dim is None:
            return ()
        edges = sorted({edge for ranges in self.rows for piece in ranges for edge in piece})
        shared: list[tuple[int, int]] = []
        for start, stop in pairwise(edges):
            holders = sum(any(a <= start and stop <= b for a, b in ranges) for ranges in self.rows)
            if holders > 1:
                if shared and shared[-1][1] == start:
                    shared[-1] = (shared[-1][0], stop)
                else:
                    shared.append((start, stop))
        return tuple(shared)

    def local_slices(self, rank: int, wanted: Ranges) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Where ``rank`` keeps the ``wanted`` global ranges: pairs of (global range, local range) along ``dim``."""
        pairs, offset = [], 0
        for start, stop in self.ranges(rank):
            for low, high in wanted:
                a, b = max(start, low), min(stop, high)
                if a < b:
                    pairs.append(((a, b), (offset + a - start, offset + b - start)))
            offset += stop - start
        return pairs


def even_ranges(length: int, parts: int) -> list[tuple[int, int]]:
    """``length`` items over ``parts``: contiguous, the first ``length % parts`` one longer. Never padded."""
    base, extra = divmod(length, parts)
    starts = [index * base + min(index, extra) for index in range(parts + 1)]
    return list(pairwise(starts))


def nonempty(piece: tuple[int, int]) -> Ranges:
    return (piece,) if piece[0] < piece[1] else ()


def scaled(ranges: Ranges, unit: int) -> Ranges:
    """Ranges of rows from ranges of groups of ``unit`` rows: heads to channels."""
    return tuple((start * unit, stop * unit) for start, stop in ranges)


def _without(piece: tuple[int, int], taken: tuple[int, int]) -> list[tuple[int, int]]:
    left, right = (piece[0], min(piece[1], taken[0])), (max(piece[0], taken[1]), piece[1])
    return [part for part in (left, right) if part[0] < part[1]]
