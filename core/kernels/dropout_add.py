"""Counted dropout, alone and with the residual's sum: on any backend the mask of ``core.random`` to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gridtron.core import random
from gridtron.core.kernels.backend import backend_of, contiguous_like, launcher, register, require
from gridtron.core.once import differentiable_once

_LARGEST_RANK = 4

_Mask = tuple[float, int, int, list[int], list[int]]
"""(p, key, sample_dim, offsets, strides)."""


def dropout_add(
    x: Float[Tensor, "*shape"],
    residual: Float[Tensor, "*shape"],
    p: float,
    key: int,
    samples: Int[Tensor, "samples"],
    sample_dim: int,
    offsets: Sequence[int],
    strides: Sequence[int],
    backend: str = "auto",
) -> Float[Tensor, "*shape"]:
    """``residual + counted_dropout(x, ...)``; the mask is drawn again in the backward pass, not kept.

    Arguments as :func:`gridtron.core.random.counted_dropout` has them; x and residual of one shape and dtype.

    Raises:
        ValueError: an unknown backend, p outside [0, 1), or tensors that do not fit each other.
    """
    fits = residual.shape == x.shape and residual.dtype == x.dtype
    require(fits, "dropout_add", "x and residual of one shape and dtype", x=x, residual=residual)
    _check(x, p, samples, sample_dim, offsets, strides)
    places = (sample_dim, list(offsets), list(strides))
    return _DropoutAdd.apply(x, residual, p, random.signed(key), samples.long(), *places, _backend(backend, x))


def counted_dropout(
    x: Float[Tensor, "*shape"],
    p: float,
    key: int,
    samples: Int[Tensor, "samples"],
    sample_dim: int,
    offsets: Sequence[int],
    strides: Sequence[int],
    backend: str = "auto",
) -> Float[Tensor, "*shape"]:
    """:func:`gridtron.core.random.counted_dropout` with a choice of its implementation, that of ``dropout_add``.

    Raises:
        ValueError: an unknown backend, p outside [0, 1), or tensors that do not fit each other.
    """
    _check(x, p, samples, sample_dim, offsets, strides)
    key, samples = random.signed(key), samples.long()
    if _backend(backend, x) == "torch":
        return random.counted_dropout(x, p, key, samples, sample_dim, offsets, strides)
    return _Dropout.apply(x, p, key, samples, sample_dim, list(offsets), list(strides))


def _check(
    x: Tensor, p: float, samples: Tensor, sample_dim: int, offsets: Sequence[int], strides: Sequence[int]
) -> None:
    if not 0 <= p < 1:
        raise ValueError(f"dropout p={p} must be at least 0 and under 1")
    fits = x.is_floating_point() and len(offsets) == len(strides) == x.ndim and 0 <= sample_dim < x.ndim
    fits = fits and samples.shape == x.shape[sample_dim : sample_dim + 1] and not samples.is_floating_point()
    rule = f"a floating x, samples (x.shape[sample_dim={sample_dim}],), and an offset and a stride a dimension"
    require(fits, "dropout", rule, x=x, samples=samples)


def _backend(backend: str, x: Tensor) -> str:
    chosen = backend_of("dropout_add", backend, x)
    return "torch" if x.ndim > _LARGEST_RANK else chosen


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        p: float,
        key: int,
        samples: Tensor,
        sample_dim: int,
        offsets: list[int],
        strides: list[int],
        backend: str,
    ) -> Tensor:
        ctx.save_for_backward(samples)
        ctx.mask, ctx.backend = (p, key, sample_dim, offsets, strides), backend
        if backend == "triton":
            return _operator(x, residual, p, key, samples, sample_dim, offsets, strides)
        return random.counted_dropout(x, p, key, samples, sample_dim, offsets, strides).add_(residual)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (samples,) = ctx.saved_tensors
        grad_x = _masked(gradient, samples, ctx.mask, ctx.backend) if ctx.needs_input_grad[0] else None
        return grad_x, gradient, *(None,) * 7


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        p: float,
        key: int,
        samples: Tensor,
        sample_dim: int,
        offsets: list[int],
        strides: list[int],
    ) -> Tensor:
        ctx.save_for_backward(samples)
        ctx.mask = (p, key, sample_dim, offsets, strides)
        return _masked(x, samples, ctx.mask, "triton")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (samples,) = ctx.saved_tensors
        return _masked(gradient, samples, ctx.mask, "triton"), *(None,) * 6


def _masked(x: Tensor, samples: Tensor, mask: _Mask, backend: str) -> Tensor:
    p, key, sample_dim, offsets, strides = mask
    if backend == "triton":
        return _operator(x, None, p, key, samples, sample_dim, offsets, strides)
    return random.counted_dropout(x, p, key, samples, sample_dim, offsets, strides)


# ---------------------------------------------------------------- Triton
_operator = register(
    "dropout_add",
    "(Tensor x, Tensor? residual, float p, int key, Tensor samples, int sample_dim, int[] offsets, int[] strides)"
    " -> Tensor",
    launcher("dropout_add", "dropout_add"),
    lambda x, *_: contiguous_like(x),
)
