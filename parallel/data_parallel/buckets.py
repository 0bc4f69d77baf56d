"""Flat buckets of gradients, and of the parameters that they belong to where ZeRO cuts them over ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from gridtron.core.communication import (
    Pending,
    all_reduce,
    split_axis,
    start_all_reduce,
)
from gridtron.core.grid import Axis
from gridtron.core.layout import nearest_divisor
from gridtron.core.pieces import Range
from gridtron.core.precision import wide_dtype
from gridtron.core.shares import start_gather_of_shares, start_sum_of_shares


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced.

    Args:
        shards: ranks over which a bucket is cut; of size 1 where every rank keeps the whole sum.
        replicas: ranks that keep the same share; of all data ranks where nothing is cut.
        each: every microbatch's gradients are reduced by themselves and added up reduced; else those of all
            microbatches are added up first and reduced once.
        release: the whole bucket's memory is let go after each reduction, and its share is kept.
        dtype: in which gradients travel; None: in which they accumulate.
    """

    shards: Axis
    replicas: Axis
    each: bool = False
    release: bool = False
    dtype: torch.dtype | None = None

    @property
    def cut(self) -> bool:
        return self.shards.size > 1


def cut_axis(axis: Axis, zero: int, shard_size: int | None) -> tuple[Axis, Axis]:
    """(ranks over which states are cut, ranks that keep the same).

    Raises:
        ValueError: a ``shard_size`` that does not divide the axis.
    """
    if zero == 0:
        return Axis("data"), axis
    if shard_size is None or shard_size == axis.size:
        return axis, Axis("data")
    if shard_size < 1 or axis.size % shard_size:
        raise ValueError(
            f"shard_size={shard_size} must divide the {axis.size} ranks of the {axis.name} axis; "
            f"nearest: shard_size={nearest_divisor(axis.size, shard_size)}"
        )
    return split_axis(axis, shard_size)


class Bucket:
    """Gradients that are reduced together, in a flat buffer in the wide dtype.

    Where it is not cut, the buffer ends with one number a parameter: how many ranks have a gradient of it. It travels
    with the sum, so that every rank knows which parameters have none anywhere.

    Attributes:
        parameters: whose gradients these are.
        slots: where each lies in the flat buffer.
        length: of the gradients in it: a multiple of the number of shares.
        arrived: who has a gradient in ``whole``; reduced: who has one in ``kept``.
        landed: whose gradient came in the pass that is reduced next.
        summed: ``kept`` holds a sum of this step, whosever gradients were in it.
        weights: the parameters themselves, flat, where the bucket is cut: theirs are views of it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], reduction: Reduction):
        self.parameters, self.reduction = list(parameters), reduction
        self.dtype = wide_dtype(parameters[0].dtype)
        self.device = parameters[0].device
        self.slots: list[Range] = []
        end = 0
        for parameter in parameters:
            self.slots.append((end, end + parameter.numel()))
            end += parameter.numel()
        count = reduction.shards.size
        self.length = -(-end // count) * count
        share, rank = self.length // count, reduction.shards.rank
        self.own: Range = (rank * share, (rank + 1) * share)
        self.tail = 0 if reduction.cut else len(self.parameters)
        # Of each parameter, where in ``kept`` its gradient, or this rank's range of it, lies.
        low, high = self.own
        self._places = [(min(max(a, low), high) - low, min(max(b, low), high) - low) for a, b in self.slots]
        self.weights = self._flatten_weights() if reduction.cut else None
        self.whole: Tensor | None = None
        self.kept: Tensor | None = None
        self._travelling: Tensor | None = None
        self.pending: Pending | None = None
        self.clear()

    def _flatten_weights(self) -> Tensor:
        weights = torch.zeros(self.length, dtype=self.parameters[0].dtype, device=self.device)
        for parameter, (start, stop) in zip(self.parameters, self.slots, strict=True):
            view = weights[start:stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        return weights

    def clear(self) -> None:
        """Forgets the step's gradients; buffers that a step needs anew stay."""
        self.arrived = [False] * len(self.parameters)
        self.reduced = [False] * len(self.parameters)
        self.landed: set[int] = set()
        self.summed = False
        self.pending = None

    # ---------------------------------------------------------------- where what lies
    def cuts(self, index: int) -> tuple[Range, ...]:
        """Of every rank of the shards, the range of the flattened parameter that it updates."""
        start, stop = self.slots[index]
        share = self.length // self.reduction.shards.size
        edges = [min(max(rank * share, start), stop) - start for rank in range(self.reduction.shards.size + 1)]
        return tuple(pairwise(edges))

    def gradient(self, index: int) -> Tensor:
        """The kept gradient of a parameter: whole, or this rank's range of it."""
        assert self.kept is not None
        start, stop = self._places[index]
        part = self.kept[start:stop]
        return part if self.reduction.cut else part.view(self.parameters[index].shape)

    # ---------------------------------------------------------------- gradients
    def add(self, index: int, gradient: Tensor) -> None:
        """Adds a gradient to what travels at the next reduction."""
        if self.whole is None:
            self.whole = self._new(torch.empty)
        start, stop = self.slots[index]
        view = self.whole[start:stop].view(self.parameters[index].shape)
        if self.arrived[index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.arrived[index] = True

    def add_reduced(self, index: int, gradient: Tensor) -> None:
        """Adds to what is kept: a gradient that is the same on all ranks already, of the kept shape."""
        if self.kept is None:
            self.kept = torch.zeros(self.own[1] - self.own[0], dtype=self.dtype, device=self.device)
        view = self.gradient(index)
        if self.reduced[index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.reduced[index] = True

    def _new(self, make: Callable[..., Tensor]) -> Tensor:
        return make(self.length + self.tail, dtype=self.dtype, device=self.device)

    @property
    def complete(self) -> bool:
        """Every parameter's gradient has come in the pass that is reduced (earlier microbatches do not count)."""
        return len(self.landed) == len(self.parameters)

    def start(self) -> None:
        """Starts the sum over the ranks; what has no gradient here counts as zero."""
        assert self.pending is None
        if self.whole is None:
            self.whole = self._new(torch.zeros)
        else:
            for (start, stop), arrived in zip(self.slots, self.arrived, strict=True):
                if not arrived:
                    self.whole[start:stop].zero_()
            self.whole[self.slots[-1][1] :].zero_()
        if self.tail:
            self.whole[self.length :] = torch.tensor(self.arrived, dtype=self.dtype)
        reduction = self.reduction
        wire = self.whole if reduction.dtype is None else self.whole.to(reduction.dtype)
        self._travelling = wire
        if reduction.cut:
            self.pending = start_sum_of_shares(wire, reduction.shards)
        else:
            self.pending = start_all_reduce(wire, reduction.replicas)

    def finish(self) -> None:
        """Waits for the sum and adds it to what is kept."""
        if self.pending is None:
            return
        self.pending.wait()
        self.pending = None
        assert self._travelling is not None
        reduction = self.reduction
        total = self._travelling[self.own[0] : self.own[1]]
        if self.tail and reduction.replicas.size > 1:
            self.arrived = (self._travelling[self.length :] > 0).tolist()
        self._travelling = None
        if reduction.each or reduction.release:
            if self.summed:
                # Whether or not this rank had a part in the sums before.
                assert self.kept is not None
                self.kept.add_(total)
            elif self.kept is None:
                self.kept = total.to(self.dtype, copy=True)
            else:
                self.kept.copy_(total)
        else:
            assert self.whole is not None
            self.kept = self.whole[self.own[0] : self.own[1]]
            if total.dtype != self.dtype:
                self.kept.copy_(total)
        if reduction.release:
            self.whole = None
        self.summed = True
        self.reduced = [a or b for a, b in zip(self.arrived, self.reduced, strict=True)]
        self.arrived = [False] * len(self.parameters)
        self.landed = set()

    def sum_replicas(self) -> None:
        """Sums the shares over the groups that hold the same ones, at the end of a step."""
        if self.reduction.cut and self.kept is not None:
            all_reduce(self.kept, self.reduction.replicas)

    def start_gather(self) -> Pending:
        """Starts fetching every rank's range of the parameters, after each has updated its own."""
        assert self.weights is not None
        return start_gather_of_shares(self.weights, self.reduction.shards)


def make_buckets(
    parameters: Sequence[nn.Parameter],
    apart: Mapping[nn.Parameter, Hashable],
    bucket_bytes: int,
    reduction: Reduction,
) -> list[Bucket]:
    """Buckets of one dtype and device, in the order in which a backward pass ends gradients: the last first.

    Args:
        parameters: in the order of the modules.
        apart: parameter -> with which others it may share a bucket; such buckets are cut in the same way on every rank
            that holds the same of them.
        bucket_bytes: the most that a bucket of several holds, in the wide dtype.
        reduction: how they are reduced.
    """
    groups: list[list[nn.Parameter]] = []
    size, kind = 0, None
    backwards = parameters[::-1]
    # Sorting is stable: buckets of their own come last.
    for parameter in sorted(backwards, key=lambda item: item in apart):
        own = parameter.numel() * wide_dtype(parameter.dtype).itemsize
        its = (parameter.dtype, parameter.device, apart.get(parameter))
        if its != kind or size + own > bucket_bytes:
            groups.append([])
            size, kind = 0, its
        groups[-1].append(parameter)
        size += own
    return [Bucket(group, reduction) for group in groups]
