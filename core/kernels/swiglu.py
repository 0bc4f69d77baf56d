"""Gated activation ``silu(gate) * up`` (Shazeer 2020, arXiv:2002.05202, equation 6)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gridtron.core.kernels.backend import backend_of, contiguous_like, launcher, register, require
from gridtron.core.once import differentiable_once


def swiglu(
    gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"], backend: str = "auto"
) -> Float[Tensor, "*shape"]:
    """``silu(gate) * up``; keeps its two inputs only, which may be halves of one tensor.

    Raises:
        ValueError: an unknown backend, or tensors that do not fit each other.
    """
    fits = gate.is_floating_point() and gate.shape == up.shape and gate.dtype == up.dtype
    require(fits, "swiglu", "a floating gate and up of one shape and dtype", gate=gate, up=up)
    return _SwiGLU.apply(gate, up, backend_of("swiglu", backend, gate))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.backend = backend
        return F.silu(gate).mul_(up) if backend == "torch" else _forward_operator(gate, up)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        if ctx.backend != "torch":
            return *_backward_operator(gradient, gate, up), None
        return *_backward(gradient, gate, up), None


def _backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_up = F.silu(gate).mul_(gradient)
    product = gradient * up
    return torch.ops.aten.silu_backward.grad_input(product, gate, grad_input=product), grad_up


# ---------------------------------------------------------------- Triton
_forward_operator = register(
    "swiglu",
    "(Tensor gate, Tensor up) -> Tensor",
    launcher("swiglu", "forward"),
    lambda gate, up: contiguous_like(gate),
)
_backward_operator = register(
    "swiglu_backward",
    "(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    launcher("swiglu", "backward"),
    lambda gradient, gate, up: (contiguous_like(gate), contiguous_like(gate)),
)
