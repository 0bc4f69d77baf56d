"""Bias and GELU: the sum is never stored; the bias's gradient by partial sums of programs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gridtron.core.kernels.backend import contiguous_like
from gridtron.core.kernels.triton_kernels.launch import (
    flat_configurations,
    flat_grid,
    partial_sums,
    processors,
    rows_of,
    ruled,
    tuned,
    wide_type,
)


@triton.jit
def _cdf(x, TANH: tl.constexpr):
    """What x is multiplied by, and its derivative."""
    if TANH:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u, which loses no digits where u is small.
        cube: tl.constexpr = 0.044715
        slope: tl.constexpr = 1.5957691216057308  # 2 sqrt(2 / pi)
        cdf = 1 / (1 + tl.exp(-slope * (x + cube * x * x * x)))
        density = cdf * (1 - cdf) * slope * (1 + 3 * cube * x * x)
    else:
        root: tl.constexpr = 0.7071067811865476  # 1 / sqrt(2)
        height: tl.constexpr = 0.3989422804014327  # 1 / sqrt(2 pi)
        cdf = 0.5 * (1 + tl.erf(x * root))
        density = height * tl.exp(-0.5 * x * x)
    return cdf, density


@triton.jit
def _forward_kernel(
    x, bias, out, numbers, columns, stride,
    FLAT: tl.constexpr, BIAS: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numbers
    column = index % columns
    place = index
    if not FLAT:
        place = index // columns * stride + column
    values = tl.load(x + place, inside, 0.0).to(WIDE)
    if BIAS:
        # Rounded like the sum that the reference stores.
        values = (values + tl.load(bias + column, inside, 0.0).to(WIDE)).to(out.dtype.element_ty).to(WIDE)
    cdf, _ = _cdf(values, TANH)
    tl.store(out + index, values * cdf, inside)


@triton.jit
def _backward_kernel(
    gradient, x, bias, grad_x, partial, rows, columns, gradient_stride, stride,
    BIAS: tl.constexpr, FOR_BIAS: tl.constexpr, TANH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([1, BLOCK], WIDE)
    shift = tl.zeros([1, BLOCK], WIDE)
    if BIAS:
        shift = tl.load(bias + column, column < columns, 0.0).to(WIDE)
    for block in range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        place = row.to(tl.int64)
        values = tl.load(x + place * stride + column, inside, 0.0).to(WIDE)
        if BIAS:
            values = (values + shift).to(grad_x.dtype.element_ty).to(WIDE)
        given = tl.load(gradient + place * gradient_stride + column, inside, 0.0).to(WIDE)
        cdf, density = _cdf(values, TANH)
        result = given * (cdf + values * density)
        tl.store(grad_x + place * columns + column, result, inside)
        if FOR_BIAS:
            total += tl.sum(tl.where(inside, result, 0.0), 0)[None, :]
    if FOR_BIAS:
        tl.store(partial + tl.program_id(1).to(tl.int64) * columns + column, total, column < columns)


def _backward_rule(columns: int) -> dict[str, int]:
    block = min(512, triton.next_power_of_2(max(1, columns)))
    return {"ROWS": 2048 // block, "BLOCK": block, "num_warps": 4}


_forward = tuned(_forward_kernel, flat_configurations(), ["FLAT", "BIAS"], {"BLOCK": 4096})
_backward = ruled(_backward_kernel, _backward_rule, {"ROWS": 64, "BLOCK": 128})


def forward(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """gelu(x + bias)."""
    out = contiguous_like(x)
    if out.numel():
        flat = rows_of(x)
        _forward[flat_grid(out.numel())](
            flat, flat if bias is None else bias.contiguous(), out, out.numel(), flat.shape[1], flat.stride(0),
            FLAT=flat.is_contiguous(), BIAS=bias is not None, TANH=tanh, WIDE=wide_type(x.dtype),
        )  # fmt: skip
    return out


def backward(gradient: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, for_bias: bool) -> tuple[Tensor, Tensor]:
    """Gradients of (x, bias), the second empty where it is not asked for."""
    grad_x = contiguous_like(x)
    given, flat = rows_of(gradient), rows_of(x)
    rows, columns = flat.shape
    groups = max(1, min(processors(x), rows))
    partial = partial_sums(x, groups, for_bias)
    if x.numel():
        _backward[lambda meta: (triton.cdiv(columns, meta["BLOCK"]), groups)](
            given, flat, flat if bias is None else bias.contiguous(), grad_x, partial,
            rows, columns, given.stride(0), flat.stride(0),
            BIAS=bias is not None, FOR_BIAS=for_bias, TANH=tanh, WIDE=wide_type(x.dtype),
        )  # fmt: skip
    return grad_x, partial.sum(0).to(x.dtype) if for_bias else x.new_empty(0)
