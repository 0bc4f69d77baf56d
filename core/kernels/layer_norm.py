"""Layer normalisation (Ba et al. 2016, arXiv:1607.06450, equation 4)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gridtron.core.kernels.backend import asked, contiguous_like, launcher, register, require, row_backend
from gridtron.core.once import differentiable_once
from gridtron.core.precision import wide_dtype


def layer_norm(
    x: Float[Tensor, "*batch features"],
    weight: Float[Tensor, "features"],
    bias: Float[Tensor, "features"] | None,
    eps: float,
    backend: str = "auto",
) -> Float[Tensor, "*batch features"]:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``; computed in float32 or wider, rounded once.

    Raises:
        ValueError: an unknown backend, or tensors that do not fit each other.
    """
    fits = x.is_floating_point() and weight.shape == x.shape[-1:] != () and (bias is None or bias.shape == weight.shape)
    rule = "a floating x (..., features), weight and bias (features,)"
    require(fits, "layer_norm", rule, x=x, weight=weight, bias=bias)
    chosen = row_backend("layer_norm", backend, x)
    if chosen == "apex":
        from gridtron.core.kernels.apex import apex_layer_norm

        return apex_layer_norm(x, weight, bias, eps)
    if chosen == "torch":
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, scale = _forward_operator(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, scale)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wanted = ctx.needs_input_grad[:3]
        return *asked(_backward_operator(gradient, *ctx.saved_tensors, *wanted), wanted), None


# ---------------------------------------------------------------- Triton
def _fake_forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, scale = (x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x.dtype)) for _ in range(2))
    return contiguous_like(x), mean, scale


def _fake_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    for_x: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight, grad_bias = (
        torch.empty_like(weight) if needed else x.new_empty(0) for needed in (for_weight, for_bias)
    )
    return contiguous_like(x, for_x), grad_weight, grad_bias


_forward_operator = register(
    "layer_norm",
    "(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    launcher("layer_norm", "forward"),
    _fake_forward,
)
_backward_operator = register(
    "layer_norm_backward",
    "(Tensor gradient, Tensor x, Tensor weight, Tensor mean, Tensor scale, bool for_x, bool for_weight, bool for_bias)"
    " -> (Tensor, Tensor, Tensor)",
    launcher("layer_norm", "backward"),
    _fake_backward,
)
