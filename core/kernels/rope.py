"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, equation 34), the two halves of a head as pairs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gridtron.core.kernels.backend import backend_of, launcher, register, require
from gridtron.core.once import differentiable_once


def rope(
    x: Float[Tensor, "batch heads sequence width"],
    cos: Float[Tensor, "sequence half"],
    sin: Float[Tensor, "sequence half"],
    backend: str = "auto",
) -> Float[Tensor, "batch heads sequence width"]:
    """Turns the pair (x[i], x[i + half]) at each position by that position's angle i; the rest stays.

    Any strides; the result has those of ``torch.empty_like(x)``.

    Raises:
        ValueError: an unknown backend, or tensors that do not fit each other.
    """
    fits = x.ndim == 4 and x.is_floating_point() and cos.shape == sin.shape and cos.ndim == 2
    fits = fits and cos.shape[0] == x.shape[2] and 2 * cos.shape[1] <= x.shape[3]
    rule = "a floating x (batch, heads, sequence, width), cos and sin (sequence, at most width / 2)"
    require(fits, "rope", rule, x=x, cos=cos, sin=sin)
    return _Rope.apply(x, cos, sin, backend_of("rope", backend, x))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning = 2 * cos.shape[-1]
    first, second = x[..., :turning].chunk(2, -1)
    if torch.compiler.is_compiling():
        # A compiler makes one pass of it, and does not follow writes into parts of a tensor.
        return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., turning:]), -1)
    out = torch.empty_like(x)
    turned_first, turned_second = out[..., :turning].chunk(2, -1)
    if turning < x.shape[-1]:
        out[..., turning:] = x[..., turning:]
    # Whole heads at once where that is possible: a loop over half a head is over before it is fast.
    torch.mul(x[..., :turning], torch.cat((cos, cos), -1), out=out[..., :turning])
    turned_first.addcmul_(second, sin, value=-1)
    turned_second.addcmul_(first, sin)
    return out


class _Rope(torch.autograd.Function):
    # A rotation's gradient is the rotation back: nothing of the input is kept.
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.backend = backend
        return _turn(x, cos, sin) if backend == "torch" else _operator(x, cos, sin, False)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        turned = _turn(gradient, cos, -sin) if ctx.backend == "torch" else _operator(gradient, cos, sin, True)
        return turned, None, None, None


# ---------------------------------------------------------------- Triton
_operator = register(
    "rope",
    "(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor",
    launcher("rope", "turn"),
    lambda x, cos, sin, back: torch.empty_like(x),
)
