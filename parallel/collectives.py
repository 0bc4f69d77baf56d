"""The conjugate pairs: collectives whose backward pass is the collective that makes them right.

Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, figure 3; f and g there):

=========================  =====================  =====================
function                   forward                backward
=========================  =====================  =====================
copy_to_region (f)         identity               all-reduce
reduce_from_region (g)     all-reduce             identity
scatter_to_region          own share              all-gather
gather_from_region         all-gather             own share
=========================  =====================  =====================

Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2; g and its conjugate there), along the
first dimension:

============================  =====================  =====================
gather_from_sequence          all-gather             reduce-scatter
reduce_scatter_to_sequence    reduce-scatter         all-gather
scatter_to_sequence           own share              all-gather
============================  =====================  =====================

On an axis of size 1 each is the identity. Inside of torch.compile they are made of functional collectives, which it can
trace: those of torch.distributed write in place and hand out what is not a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gridtron.core.communication import all_gather, all_gather_uneven, all_reduce, reduce_scatter
from gridtron.core.grid import Axis
from gridtron.core.once import differentiable_once
from gridtron.core.sharding import even_ranges
from gridtron.core.torch_compat import functional_all_gather, functional_all_reduce, functional_reduce_scatter


def _sum(x: Tensor, axis: Axis) -> Tensor:
    """As a new tensor."""
    if torch.compiler.is_compiling():
        return functional_all_reduce(x.contiguous(), axis.group)
    return all_reduce(x.contiguous().clone(), axis)


def _gather(x: Tensor, axis: Axis) -> Tensor:
    if torch.compiler.is_compiling():
        return functional_all_gather(x.contiguous(), axis.group)
    return all_gather(x, axis)


def _sum_share(x: Tensor, axis: Axis) -> Tensor:
    if torch.compiler.is_compiling():
        return functional_reduce_scatter(x.contiguous(), axis.group)
    return reduce_scatter(x, axis)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum(gradient, ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _sum(x, axis)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.length = axis, dim, x.shape[dim]
        start, stop = even_ranges(x.shape[dim], axis.size)[axis.rank]
        return x.narrow(dim, start, stop - start).contiguous()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        lengths = [stop - start for start, stop in even_ranges(ctx.length, ctx.axis.size)]
        return torch.cat(all_gather_uneven(gradient, lengths, ctx.axis, ctx.dim), ctx.dim), None, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, lengths: tuple[int, ...]) -> Tensor:
        ctx.dim, ctx.start, ctx.length = dim, sum(lengths[: axis.rank]), lengths[axis.rank]
        return torch.cat(all_gather_uneven(x, lengths, axis, dim), dim)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.narrow(ctx.dim, ctx.start, ctx.length).contiguous(), None, None, None


class _GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(x, axis)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum_share(gradient, ctx.axis), None


class _ReduceScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _sum_share(x, axis)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gather(gradient, ctx.axis), None


def copy_to_region(x: Float[Tensor, "..."], axis: Any = None) -> Float[Tensor, "..."]:
    """Identity forward, sum over the axis backward: before a column-parallel product."""
    axis = Axis.of(axis)
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from_region(x: Float[Tensor, "..."], axis: Any = None) -> Float[Tensor, "..."]:
    """Sum over the axis forward, identity backward: after a row-parallel product."""
    axis = Axis.of(axis)
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def scatter_to_region(x: Float[Tensor, "..."], axis: Any = None, dim: int = -1) -> Float[Tensor, "..."]:
    """This rank's share of ``dim`` forward (the first ranks longer where it does not divide), all-gather backward."""
    axis = Axis.of(axis)
    return x if axis.size == 1 else _ScatterTo.apply(x, axis, dim % x.ndim)


def gather_from_region(
    x: Float[Tensor, "..."], axis: Any = None, dim: int = -1, lengths: tuple[int, ...] | None = None
) -> Float[Tensor, "..."]:
    """All ranks' shares of ``dim`` in rank order forward, this rank's share backward.

    Args:
        lengths: every rank's size along ``dim``; default: all as this rank's.
    """
    axis = Axis.of(axis)
    if axis.size == 1:
        return x
    return _GatherFrom.apply(x, axis, dim % x.ndim, lengths or (x.shape[dim],) * axis.size)


def gather_from_sequence(x: Float[Tensor, "share ..."], axis: Any = None) -> Float[Tensor, "sequence ..."]:
    """All-gather of the first dimension forward, reduce-scatter backward: into a tensor-parallel region."""
    axis = Axis.of(axis)
    return x if axis.size == 1 else _GatherFromSequence.apply(x, axis)


def reduce_scatter_to_sequence(x: Float[Tensor, "sequence ..."], axis: Any = None) -> Float[Tensor, "share ..."]:
    """Reduce-scatter over the first dimension forward, all-gather backward: out of a tensor-parallel region.

    Raises:
        ValueError: the first dimension does not divide by the axis.
    """
    axis = Axis.of(axis)
    return x if axis.size == 1 else _ReduceScatterToSequence.apply(x, axis)


def scatter_to_sequence(x: Float[Tensor, "sequence ..."], axis: Any = None) -> Float[Tensor, "share ..."]:
    """This rank's share of the first dimension forward, all-gather backward: a replicated tensor enters the
    sequence-parallel region, and every rank gets the whole gradient."""
    return scatter_to_region(x, axis, dim=0)
