"""Gradients in flat buckets: accumulated in the wide dtype, reduced behind the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gridtron.core.communication import Done, Pending, start_all_reduce
from gridtron.core.grid import Axis
from gridtron.core.precision import wide_dtype


@dataclass
class Bucket:
    """Gradients that are reduced together.

    The flat buffer ends with one number a parameter: how many ranks have a gradient of it. It travels with the sum, so
    that every rank knows which parameters have none anywhere.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    arrived: list[bool] = field(default_factory=list)
    landed: set[int] = field(default_factory=set)
    pending: Pending | None = None
    travelling: Tensor | None = None

    @staticmethod
    def over(parameters: list[nn.Parameter]) -> Bucket:
        dtype = wide_dtype(parameters[0].dtype)
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes) + len(parameters), dtype=dtype, device=parameters[0].device)
        views = [
            piece.view_as(parameter)
            for piece, parameter in zip(flat.split([*sizes, len(sizes)]), parameters, strict=False)
        ]
        return Bucket(parameters, flat, views, [False] * len(parameters))

    @property
    def flags(self) -> Tensor:
        return self.flat[len(self.flat) - len(self.parameters) :]

    @property
    def complete(self) -> bool:
        """Every parameter's gradient has come in the pass that is reduced (earlier microbatches do not count)."""
        return len(self.landed) == len(self.parameters)

    def add(self, index: int, gradient: Tensor, last: bool) -> None:
        if last:
            self.landed.add(index)
        self.keep(index, gradient)

    def keep(self, index: int, gradient: Tensor) -> None:
        """Adds a gradient without counting it for the pass that is reduced."""
        if self.arrived[index]:
            self.views[index].add_(gradient)
        else:
            self.views[index].copy_(gradient)
            self.arrived[index] = True

    def start_reduction(self, axis: Axis, dtype: torch.dtype | None) -> None:
        """Starts the SUM over the axis; what has no gradient here counts as zero."""
        for view, arrived in zip(self.views, self.arrived, strict=True):
            if not arrived:
                view.zero_()
        if axis.size == 1:
            self.pending = Done()
            return
        self.flags.copy_(torch.tensor(self.arrived, dtype=self.flat.dtype))
        self.travelling = self.flat if dtype is None or dtype == self.flat.dtype else self.flat.to(dtype)
        self.pending = start_all_reduce(self.travelling, axis)

    def finish_reduction(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        if self.travelling is not None:
            if self.travelling is not self.flat:
                self.flat.copy_(self.travelling)
            self.arrived = (self.flags > 0).tolist()
            self.travelling = None

    def clear(self) -> None:
        self.arrived = [False] * len(self.parameters)
        self.landed = set()
        self.pending = None


def make_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Buckets of one wide dtype and device, in the order in which a backward pass ends gradients: the last first."""
    groups: list[list[nn.Parameter]] = []
    size, kind = 0, None
    for parameter in reversed(parameters):
        dtype = wide_dtype(parameter.dtype)
        own = parameter.numel() * dtype.itemsize
        if not groups or (dtype, parameter.device) != kind or size + own > bucket_bytes:
            groups.append([])
            size, kind = 0, (dtype, parameter.device)
        groups[-1].append(parameter)
        size += own
    return [Bucket.over(group) for group in groups]
