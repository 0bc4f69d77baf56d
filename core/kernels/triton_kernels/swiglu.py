"""Gated activation: elementwise, each operand with its own distance between rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gridtron.core.kernels.backend import contiguous_like
from gridtron.core.kernels.triton_kernels.launch import flat_configurations, flat_grid, rows_of, tuned, wide_type


@triton.jit
def _forward_kernel(
    gate, up, out, numbers, columns, gate_stride, up_stride,
    FLAT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numbers
    gate_place, up_place = index, index
    if not FLAT:
        row, column = index // columns, index % columns
        gate_place, up_place = row * gate_stride + column, row * up_stride + column
    g = tl.load(gate + gate_place, inside, 0.0).to(WIDE)
    u = tl.load(up + up_place, inside, 0.0).to(WIDE)
    # Rounded before the product, as the reference does.
    silu = (g / (1 + tl.exp(-g))).to(out.dtype.element_ty).to(WIDE)
    tl.store(out + index, silu * u, inside)


@triton.jit
def _backward_kernel(
    gradient, gate, up, grad_gate, grad_up, numbers, columns, gradient_stride, gate_stride, up_stride,
    FLAT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numbers
    place, gate_place, up_place = index, index, index
    if not FLAT:
        row, column = index // columns, index % columns
        place = row * gradient_stride + column
        gate_place, up_place = row * gate_stride + column, row * up_stride + column
    given = tl.load(gradient + place, inside, 0.0).to(WIDE)
    g = tl.load(gate + gate_place, inside, 0.0).to(WIDE)
    u = tl.load(up + up_place, inside, 0.0).to(WIDE)
    sigmoid = 1 / (1 + tl.exp(-g))
    silu = (g * sigmoid).to(grad_up.dtype.element_ty).to(WIDE)
    tl.store(grad_up + index, silu * given, inside)
    scaled = (given * u).to(grad_gate.dtype.element_ty).to(WIDE)
    tl.store(grad_gate + index, scaled * sigmoid * (1 + g * (1 - sigmoid)), inside)


_forward = tuned(_forward_kernel, flat_configurations(), ["FLAT"], {"BLOCK": 4096})
_backward = tuned(_backward_kernel, flat_configurations(), ["FLAT"], {"BLOCK": 4096})


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    out = contiguous_like(gate)
    if out.numel():
        a, b = rows_of(gate), rows_of(up)
        _forward[flat_grid(out.numel())](
            a, b, out, out.numel(), a.shape[1], a.stride(0), b.stride(0),
            FLAT=a.is_contiguous() and b.is_contiguous(), WIDE=wide_type(gate.dtype),
        )  # fmt: skip
    return out


def backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of (gate, up)."""
    grad_gate, grad_up = contiguous_like(gate), contiguous_like(gate)
    if gate.numel():
        given, a, b = rows_of(gradient), rows_of(gate), rows_of(up)
        _backward[flat_grid(gate.numel())](
            given, a, b, grad_gate, grad_up, gate.numel(), a.shape[1], given.stride(0), a.stride(0), b.stride(0),
            FLAT=all(one.is_contiguous() for one in (given, a, b)), WIDE=wide_type(gate.dtype),
        )  # fmt: skip
    return grad_gate, grad_up
