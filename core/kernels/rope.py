"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, equation 34), the two halves of a head as pairs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def rope(
    x: Float[Tensor, "batch heads sequence width"],
    cos: Float[Tensor, "sequence half"],
    sin: Float[Tensor, "sequence half"],
) -> Float[Tensor, "batch heads sequence width"]:
    """Turns the pair (x[i], x[i + half]) at each position by that position's angle i; the rest stays."""
    return _Rope.apply(x, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    turning = 2 * cos.shape[-1]
    first, second = x[..., :turning].chunk(2, -1)
    turned_first, turned_second = out[..., :turning].chunk(2, -1)
    if turning < x.shape[-1]:
        out[..., turning:] = x[..., turning:]
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    return out


class _Rope(torch.autograd.Function):
    # A rotation's gradient is the rotation back: nothing of the input is kept.
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, -sin), None, None
