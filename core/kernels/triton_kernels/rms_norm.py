"""Root mean square normalisation: one read of the input a pass, the weight's gradient by partial sums of programs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gridtron.core.kernels.backend import contiguous_like
from gridtron.core.kernels.triton_kernels.launch import partial_sums, processors, row_rule, rows_of, ruled, wide_type
from gridtron.core.precision import wide_dtype


@triton.jit
def _forward_kernel(
    x, weight, y, scale, rows, columns, stride,
    EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    place = row.to(tl.int64)
    values = tl.load(x + place * stride + column, inside, 0.0).to(WIDE)
    factor = 1 / tl.sqrt(tl.sum(values * values, 1) / columns + EPS)
    gain = tl.load(weight + column, column < columns, 0.0).to(WIDE)
    # Rounded before the gain, as the reference does: equal to it in the model's dtype.
    normed = (values * factor[:, None]).to(y.dtype.element_ty).to(WIDE)
    tl.store(y + place * columns + column, normed * gain, inside)
    tl.store(scale + place, factor[:, None], row < rows)


@triton.jit
def _backward_kernel(
    gradient, x, weight, scale, grad_x, partial, rows, columns, gradient_stride, stride,
    FOR_X: tl.constexpr, FOR_WEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    gain = tl.load(weight + column, column < columns, 0.0).to(WIDE)
    total = tl.zeros([1, COLUMNS], WIDE)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        place = row.to(tl.int64)
        factor = tl.load(scale + place, row < rows, 0.0)
        normed = tl.load(x + place * stride + column, inside, 0.0).to(WIDE) * factor
        given = tl.load(gradient + place * gradient_stride + column, inside, 0.0).to(WIDE)
        if FOR_WEIGHT:
            total += tl.sum(given * normed, 0)[None, :]
        if FOR_X:
            scaled = given * gain
            mean = tl.sum(scaled * normed, 1)[:, None] / columns
            tl.store(grad_x + place * columns + column, (scaled - normed * mean) * factor, inside)
    if FOR_WEIGHT:
        tl.store(partial + tl.program_id(0).to(tl.int64) * columns + column, total, column < columns)


_forward = ruled(_forward_kernel, row_rule, {"ROWS": 64})
_backward = ruled(_backward_kernel, row_rule, {"ROWS": 64})


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, the factor of each row)."""
    flat = rows_of(x)
    rows, columns = flat.shape
    y = contiguous_like(x)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x.dtype))
    if y.numel():
        _forward[lambda meta: (triton.cdiv(rows, meta["ROWS"]),)](
            flat, weight.contiguous(), y, scale, rows, columns, flat.stride(0),
            EPS=eps, COLUMNS=triton.next_power_of_2(columns), WIDE=wide_type(x.dtype),
        )  # fmt: skip
    return y, scale


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of (x, weight), each empty where it is not asked for."""
    given, flat = rows_of(gradient), rows_of(x)
    rows, columns = flat.shape
    grad_x = contiguous_like(x, for_x)
    programs = max(1, min(4 * processors(x), rows))
    partial = partial_sums(x, programs, for_weight)
    if x.numel():
        _backward[(programs,)](
            given, flat, weight.contiguous(), scale, grad_x, partial, rows, columns, given.stride(0), flat.stride(0),
            FOR_X=for_x, FOR_WEIGHT=for_weight, COLUMNS=triton.next_power_of_2(columns), WIDE=wide_type(x.dtype),
        )  # fmt: skip
    return grad_x, partial.sum(0).to(weight.dtype) if for_weight else x.new_empty(0)
