"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gridtron.core.kernels.backend import asked, contiguous_like, launcher, register, require, row_backend
from gridtron.core.kernels.blocks import as_rows
from gridtron.core.once import differentiable_once
from gridtron.core.precision import wide_dtype


def rms_norm(
    x: Float[Tensor, "*batch features"], weight: Float[Tensor, "features"], eps: float, backend: str = "auto"
) -> Float[Tensor, "*batch features"]:
    """``x / sqrt(mean(x^2) + eps) * weight``; the mean and the quotient in float32 or wider.

    Raises:
        ValueError: an unknown backend, or tensors that do not fit each other.
    """
    fits = x.is_floating_point() and weight.shape == x.shape[-1:] != ()
    require(fits, "rms_norm", "a floating x (..., features) and weight (features,)", x=x, weight=weight)
    chosen = row_backend("rms_norm", backend, x)
    if chosen == "apex":
        from gridtron.core.kernels.apex import apex_rms_norm

        return apex_rms_norm(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps, chosen)


class _RMSNorm(torch.autograd.Function):
    # torch's own composes six passes on a CPU and keeps three activations; this keeps the input and one number a row.
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, backend: str) -> Tensor:
        y, scale = (_forward if backend == "torch" else _forward_operator)(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.backend = backend
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wanted = ctx.needs_input_grad[:2]
        run = _backward if ctx.backend == "torch" else _backward_operator
        return *asked(run(gradient, *ctx.saved_tensors, *wanted), wanted), None, None


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(x.dtype)
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).to(x.dtype).mul_(weight), scale


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    grad_x = grad_weight = x.new_empty(0)
    wide, factor = scale.dtype, as_rows(scale)
    values, gradient, gain = as_rows(x).to(wide), as_rows(gradient).to(wide), weight.to(wide)
    # Passes over memory are what this costs on a CPU: six, and the normed input is not made again.
    product = gradient * values
    if for_weight:
        grad_weight = torch.mv(product.t(), factor.squeeze(1)).to(weight.dtype)
    if for_x:
        # d/dx of x s(x): s (g w - n mean(n g w)), n = s x the normed input.
        mean = torch.mv(product, gain).unsqueeze(1).mul_(factor).div_(x.shape[-1])
        out = torch.mul(gradient, gain, out=product).addcmul_(values, mean.mul_(factor), value=-1).mul_(factor)
        grad_x = out.to(x.dtype).view(x.shape)
    return grad_x, grad_weight


# ---------------------------------------------------------------- Triton
def _fake_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return contiguous_like(x), x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x.dtype))


def _fake_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    return contiguous_like(x, for_x), torch.empty_like(weight) if for_weight else x.new_empty(0)


_forward_operator = register(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    launcher("rms_norm", "forward"),
    _fake_forward,
)
_backward_operator = register(
    "rms_norm_backward",
    "(Tensor gradient, Tensor x, Tensor weight, Tensor scale, bool for_x, bool for_weight) -> (Tensor, Tensor)",
    launcher("rms_norm", "backward"),
    _fake_backward,
)
