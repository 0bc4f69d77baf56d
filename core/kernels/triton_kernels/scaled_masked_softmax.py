"""Softmax of scaled and masked scores: a row is read and written once; the causal mask is never stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gridtron.core.kernels.backend import contiguous_like
from gridtron.core.kernels.triton_kernels.launch import row_rule, rows_of, ruled, wide_type


@triton.jit
def _forward_kernel(
    scores, mask, weights, rows, heads, queries, columns, stride, mask_batch, mask_head, mask_query, mask_key,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (key < columns)
    query = row % queries
    counts, read = inside, inside
    if CAUSAL:
        last = query + columns - queries
        counts = counts & (key <= last)
        # What lies in the future is not read, in eights: a mask that differs among neighbours would part their read.
        read = read & (key // 8 * 8 <= last)
    if MASK:
        head = row // queries
        place = head // heads * mask_batch + head % heads * mask_head + query * mask_query + key * mask_key
        counts = counts & (tl.load(mask + place, inside, 0) == 0)
    values = tl.load(scores + row * stride + key, read, 0.0).to(WIDE) * SCALE
    values = tl.where(counts, values, float("-inf"))
    highest = tl.max(values, 1)[:, None]
    # A row without any key: -inf less -inf would be no number.
    exponents = tl.exp(values - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(exponents, 1)[:, None]
    tl.store(weights + row * columns + key, exponents / tl.where(total == 0, 1.0, total), inside)


@triton.jit
def _backward_kernel(
    gradient, weights, grad, rows, columns, gradient_stride,
    SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (key < columns)
    given = tl.load(gradient + row * gradient_stride + key, inside, 0.0).to(WIDE)
    share = tl.load(weights + row * columns + key, inside, 0.0).to(WIDE)
    mean = tl.sum(given * share, 1)[:, None]
    tl.store(grad + row * columns + key, share * (given - mean) * SCALE, inside)


_forward = ruled(_forward_kernel, row_rule, {"ROWS": 128})
_backward = ruled(_backward_kernel, row_rule, {"ROWS": 128})


def forward(scores: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """The weights."""
    weights = contiguous_like(scores)
    if weights.numel():
        flat = rows_of(scores)
        rows, columns = flat.shape
        _, heads, queries, _ = scores.shape
        # One byte a key, whatever the driver makes of truth values.
        seen = flat if mask is None else mask.expand(scores.shape).view(torch.uint8)
        strides = (0, 0, 0, 0) if mask is None else seen.stride()
        _forward[lambda meta: (triton.cdiv(rows, meta["ROWS"]),)](
            flat, seen, weights, rows, heads, queries, columns, flat.stride(0), *strides,
            SCALE=scale, CAUSAL=causal, MASK=mask is not None,
            COLUMNS=triton.next_power_of_2(columns), WIDE=wide_type(scores.dtype),
        )  # fmt: skip
    return weights


def backward(gradient: Tensor, weights: Tensor, scale: float) -> Tensor:
    """The gradient of the scores."""
    grad = contiguous_like(weights)
    if grad.numel():
        given, flat = rows_of(gradient), rows_of(weights)
        rows, columns = flat.shape
        _backward[lambda meta: (triton.cdiv(rows, meta["ROWS"]),)](
            given, flat, grad, rows, columns, given.stride(0),
            SCALE=scale, COLUMNS=triton.next_power_of_2(columns), WIDE=wide_type(weights.dtype),
        )  # fmt: skip
    return grad
