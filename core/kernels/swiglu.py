"""Gated activation ``silu(gate) * up`` (Shazeer 2020, arXiv:2002.05202, equation 6)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def swiglu(gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``silu(gate) * up``; keeps its two inputs only."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(gradient)
        grad_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return grad_gate, grad_up
