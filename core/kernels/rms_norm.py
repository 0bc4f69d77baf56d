"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gridtron.core.precision import wide_dtype


def rms_norm(
    x: Float[Tensor, "*batch features"], weight: Float[Tensor, "features"], eps: float
) -> Float[Tensor, "*batch features"]:
    """``x / sqrt(mean(x^2) + eps) * weight``; the mean and the quotient in float32 or wider."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    # torch's own composes six passes on a CPU and keeps three activations; this keeps the input and one number a row.
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(wide_dtype(x.dtype))
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return wide.mul(scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype).mul(scale)
        gradient = gradient.to(scale.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            scaled = gradient * weight
            # d/dx of x s(x): s g - n mean(n g) s, n the normed input.
            mean = torch.linalg.vecdot(scaled, normed).unsqueeze(-1).div_(x.shape[-1])
            grad_x = scaled.addcmul_(normed, mean, value=-1).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None
