"""Bias and GELU in one pass (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gridtron.core.kernels.backend import asked, backend_of, contiguous_like, launcher, register, require
from gridtron.core.kernels.blocks import as_rows
from gridtron.core.once import differentiable_once

APPROXIMATIONS = ("none", "tanh")


def bias_gelu(
    x: Float[Tensor, "*batch features"],
    bias: Float[Tensor, "features"] | None,
    approximate: str = "none",
    backend: str = "auto",
) -> Float[Tensor, "*batch features"]:
    """``gelu(x + bias)``; keeps its two inputs only.

    Args:
        approximate: "none", by the error function; "tanh", GPT-2's.

    Raises:
        ValueError: an unknown backend or approximation, or tensors that do not fit each other.
    """
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate={approximate!r}: it is one of {', '.join(APPROXIMATIONS)}")
    fits = x.is_floating_point() and x.ndim > 0 and (bias is None or bias.shape == x.shape[-1:])
    require(fits, "bias_gelu", "a floating x (..., features) and bias (features,) or None", x=x, bias=bias)
    chosen = backend_of("bias_gelu", backend, x)
    if bias is None and chosen == "torch":
        return F.gelu(x, approximate=approximate)
    return _BiasGELU.apply(x, bias, approximate, chosen)


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, approximate: str, backend: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.approximate, ctx.backend = approximate, backend
        if backend == "torch":
            assert bias is not None
            return F.gelu(x + bias, approximate=approximate)
        return _forward_operator(x, bias, approximate == "tanh")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if ctx.backend == "torch":
            grad_x = torch.ops.aten.gelu_backward(gradient, x + bias, approximate=ctx.approximate)
            return grad_x, as_rows(grad_x).sum(0) if wanted[1] else None, None, None
        return *asked(_backward_operator(gradient, x, bias, ctx.approximate == "tanh", wanted[1]), wanted), None, None


# ---------------------------------------------------------------- Triton
def _fake_backward(
    gradient: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, for_bias: bool
) -> tuple[Tensor, Tensor]:
    return contiguous_like(x), x.new_empty(x.shape[-1] if for_bias else 0)


_forward_operator = register(
    "bias_gelu",
    "(Tensor x, Tensor? bias, bool tanh) -> Tensor",
    launcher("bias_gelu", "forward"),
    lambda x, bias, tanh: contiguous_like(x),
)
_backward_operator = register(
    "bias_gelu_backward",
    "(Tensor gradient, Tensor x, Tensor? bias, bool tanh, bool for_bias) -> (Tensor, Tensor)",
    launcher("bias_gelu", "backward"),
    _fake_backward,
)
