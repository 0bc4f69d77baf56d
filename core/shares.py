"""A flat buffer whose equal shares belong to the ranks of an axis: sums brought to their owners, values to everyone.

On Gloo by pairs of sends and receives: its own reduce-scatter copies the input and sums it over all ranks, and its
all-gather copies what is in place already.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from gridtron.core.communication import Done, Pending, start_receive, start_send
from gridtron.core.grid import Axis
from gridtron.core.torch_compat import all_gather_single, reduce_scatter_single


def share_of(flat: Tensor, axis: Axis, place: int) -> Tensor:
    """The share (n,) of the rank at ``place`` in a buffer (axis.size * n,): a view."""
    length = flat.numel() // axis.size
    return flat[place * length : (place + 1) * length]


def start_sum_of_shares(flat: Tensor, axis: Axis) -> Pending:
    """In place: this rank's share becomes the sum of that share over all ranks; the other shares have no meaning then.

    The buffer (axis.size * n,) must be left alone until wait().
    """
    assert flat.ndim == 1 and flat.numel() % axis.size == 0, (flat.shape, axis.size)
    if axis.size == 1 or flat.numel() == 0:
        return Done()
    own = share_of(flat, axis, axis.rank)
    if _is_gloo(flat, axis):
        return _Sum(flat, axis)
    return cast(Pending, reduce_scatter_single(own, flat, group=axis.group, async_op=True))


def start_gather_of_shares(flat: Tensor, axis: Axis) -> Pending:
    """In place: every rank's share, from the rank that it belongs to."""
    assert flat.ndim == 1 and flat.numel() % axis.size == 0, (flat.shape, axis.size)
    if axis.size == 1 or flat.numel() == 0:
        return Done()
    own = share_of(flat, axis, axis.rank)
    if _is_gloo(flat, axis):
        others = _others(axis)
        received = [start_receive(share_of(flat, axis, place), axis, place) for place in reversed(others)]
        return _All([*received, *(start_send(own, axis, place) for place in others)])
    return cast(Pending, all_gather_single(flat, own, group=axis.group, async_op=True))


def _is_gloo(flat: Tensor, axis: Axis) -> bool:
    return flat.device.type == "cpu" and "gloo" in dist.get_backend(axis.group)


def _others(axis: Axis) -> list[int]:
    """The other places, the next one first: not all ranks send to the same one at once."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]


class _All:
    """Several that must all be over."""

    def __init__(self, pending: list[Pending]):
        self.pending = pending

    def wait(self) -> None:
        for item in self.pending:
            item.wait()


class _Sum(_All):
    """Shares of the other ranks that are added, in the order of their places, once they are here."""

    def __init__(self, flat: Tensor, axis: Axis):
        others = _others(axis)
        self.own = share_of(flat, axis, axis.rank)
        self.received = {place: torch.empty_like(self.own) for place in sorted(others)}
        posted = [start_receive(self.received[place], axis, place) for place in reversed(others)]
        super().__init__([*posted, *(start_send(share_of(flat, axis, place), axis, place) for place in others)])

    def wait(self) -> None:
        super().wait()
        for tensor in self.received.values():
            self.own.add_(tensor)
