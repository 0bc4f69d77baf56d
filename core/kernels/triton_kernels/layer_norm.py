"""Layer normalisation: one read of the input a pass, gradients of weight and bias by partial sums of programs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gridtron.core.kernels.backend import contiguous_like
from gridtron.core.kernels.triton_kernels.launch import partial_sums, processors, row_rule, rows_of, ruled, wide_type
from gridtron.core.precision import wide_dtype


@triton.jit
def _forward_kernel(
    x, weight, bias, y, mean, scale, rows, columns, stride,
    EPS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    place = row.to(tl.int64)
    values = tl.load(x + place * stride + column, inside, 0.0).to(WIDE)
    center = (tl.sum(values, 1) / columns)[:, None]
    # A second look at numbers in registers: the difference of squares would cancel where the mean is large.
    values = tl.where(inside, values - center, 0.0)
    factor = (1 / tl.sqrt(tl.sum(values * values, 1) / columns + EPS))[:, None]
    result = values * factor * tl.load(weight + column, column < columns, 0.0).to(WIDE)
    if BIAS:
        result += tl.load(bias + column, column < columns, 0.0).to(WIDE)
    tl.store(y + place * columns + column, result, inside)
    tl.store(mean + place, center, row < rows)
    tl.store(scale + place, factor, row < rows)


@triton.jit
def _backward_kernel(
    gradient, x, weight, mean, scale, grad_x, partial_weight, partial_bias, rows, columns, gradient_stride, stride,
    FOR_X: tl.constexpr, FOR_WEIGHT: tl.constexpr, FOR_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    gain = tl.load(weight + column, column < columns, 0.0).to(WIDE)
    for_weight = tl.zeros([1, COLUMNS], WIDE)
    for_bias = tl.zeros([1, COLUMNS], WIDE)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        place = row.to(tl.int64)
        center = tl.load(mean + place, row < rows, 0.0)
        factor = tl.load(scale + place, row < rows, 0.0)
        values = tl.load(x + place * stride + column, inside, 0.0).to(WIDE)
        normed = tl.where(inside, (values - center) * factor, 0.0)
        given = tl.load(gradient + place * gradient_stride + column, inside, 0.0).to(WIDE)
        if FOR_WEIGHT:
            for_weight += tl.sum(given * normed, 0)[None, :]
        if FOR_BIAS:
            for_bias += tl.sum(given, 0)[None, :]
        if FOR_X:
            scaled = given * gain
            shift = tl.sum(scaled, 1)[:, None] / columns
            slope = tl.sum(scaled * normed, 1)[:, None] / columns
            tl.store(grad_x + place * columns + column, (scaled - shift - normed * slope) * factor, inside)
    own = tl.program_id(0).to(tl.int64) * columns + column
    if FOR_WEIGHT:
        tl.store(partial_weight + own, for_weight, column < columns)
    if FOR_BIAS:
        tl.store(partial_bias + own, for_bias, column < columns)


_forward = ruled(_forward_kernel, row_rule, {"ROWS": 64})
_backward = ruled(_backward_kernel, row_rule, {"ROWS": 64})


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean of each row, factor of each row)."""
    flat = rows_of(x)
    rows, columns = flat.shape
    y = contiguous_like(x)
    mean, scale = (x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x.dtype)) for _ in range(2))
    weight = weight.contiguous()
    if y.numel():
        _forward[lambda meta: (triton.cdiv(rows, meta["ROWS"]),)](
            flat, weight, weight if bias is None else bias.contiguous(), y, mean, scale, rows, columns, flat.stride(0),
            EPS=eps, BIAS=bias is not None, COLUMNS=triton.next_power_of_2(columns), WIDE=wide_type(x.dtype),
        )  # fmt: skip
    return y, mean, scale


def backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    for_x: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias), each empty where it is not asked for."""
    given, flat = rows_of(gradient), rows_of(x)
    rows, columns = flat.shape
    grad_x = contiguous_like(x, for_x)
    programs = max(1, min(4 * processors(x), rows))
    partial_weight, partial_bias = partial_sums(x, programs, for_weight), partial_sums(x, programs, for_bias)
    if x.numel():
        _backward[(programs,)](
            given, flat, weight.contiguous(), mean, scale, grad_x, partial_weight, partial_bias,
            rows, columns, given.stride(0), flat.stride(0), FOR_X=for_x, FOR_WEIGHT=for_weight, FOR_BIAS=for_bias,
            COLUMNS=triton.next_power_of_2(columns), WIDE=wide_type(x.dtype),
        )  # fmt: skip
    grad_weight = partial_weight.sum(0).to(weight.dtype) if for_weight else x.new_empty(0)
    return grad_x, grad_weight, partial_bias.sum(0).to(weight.dtype) if for_bias else x.new_empty(0)
