"""Cross-entropy over a share of the vocabulary: the logits are read once a pass, and no wide copy of them is made."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gridtron.core.kernels.backend import contiguous_like
from gridtron.core.kernels.triton_kernels.launch import ruled, tuned, wide_type
from gridtron.core.precision import wide_dtype

# As in the operation's file; a kernel reads no others of a module's values than these.
_IGNORED = tl.constexpr(-2)


@triton.jit
def _statistics_kernel(
    logits, local, maximum, total, logit, rows, columns, stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.load(local + row, row < rows, _IGNORED)
    counts = place != _IGNORED
    start = logits + row * stride
    highest = tl.full([ROWS], float("-inf"), WIDE)
    exponents = tl.zeros([ROWS], WIDE)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = counts[:, None] & (column < columns)[None, :]
        values = tl.load(start[:, None] + column[None, :], inside, float("-inf")).to(WIDE)
        now = tl.maximum(highest, tl.max(values, 1))
        # -inf less -inf would be no number.
        base = tl.where(now == float("-inf"), 0.0, now)
        exponents = exponents * tl.exp(highest - base) + tl.sum(tl.exp(values - base[:, None]), 1)
        highest = now
    tl.store(maximum + row, tl.where(counts, highest, 0.0), row < rows)
    tl.store(total + row, tl.where(counts, exponents, 1.0), row < rows)
    tl.store(logit + row, tl.load(start + place, place >= 0, 0.0).to(WIDE), row < rows)


@triton.jit
def _gradient_kernel(
    logits, out, maximum, factor, weight, local, rows, columns, stride, out_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    place = tl.load(local + row, row < rows, _IGNORED)
    counts = place != _IGNORED
    highest = tl.load(maximum + row, row < rows, 0.0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    scale = tl.load(factor + row, row < rows, 0.0)
    own = tl.load(weight + row, row < rows, 0.0)
    inside = (row < rows) & (column < columns)
    values = tl.load(logits + row * stride + column, inside & counts, 0.0).to(WIDE)
    result = tl.exp(values - base) * scale - tl.where(column == place, own, 0.0)
    tl.store(out + row * out_stride + column, tl.where(counts, result, 0.0), inside)


def _statistics_rule(columns: int) -> dict[str, int]:
    block = min(8192, triton.next_power_of_2(max(1, columns)))
    return {"ROWS": max(1, 2048 // block), "BLOCK": block, "num_warps": max(4, block // 512)}


_GRADIENT = [
    triton.Config({"ROWS": rows, "BLOCK": block}, num_warps=warps)
    for rows, block, warps in ((1, 1024, 4), (1, 2048, 4), (1, 4096, 8), (4, 1024, 8))
]
_INTERPRETED = {"ROWS": 64, "BLOCK": 128}
_statistics = ruled(_statistics_kernel, _statistics_rule, _INTERPRETED)
_gradient = tuned(_gradient_kernel, _GRADIENT, ["columns"], _INTERPRETED)
_gradient_in_place = tuned(_gradient_kernel, _GRADIENT, ["columns"], _INTERPRETED, restored=["out"])


def statistics(logits: Tensor, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, sum of exponents, target's logit) of each row."""
    rows, columns = logits.shape
    wide = wide_dtype(logits.dtype)
    maximum, total, logit = (logits.new_empty(rows, dtype=wide) for _ in range(3))
    if rows:
        _statistics[lambda meta: (triton.cdiv(rows, meta["ROWS"]),)](
            logits, local.contiguous(), maximum, total, logit, rows, columns, logits.stride(0), WIDE=wide_type(wide)
        )
    return maximum, total, logit


def gradient(logits: Tensor, maximum: Tensor, factor: Tensor, weight: Tensor, local: Tensor) -> Tensor:
    """The gradient of the logits."""
    out = contiguous_like(logits)
    _launch(_gradient, logits, out, maximum, factor, weight, local)
    return out


def gradient_in_place(logits: Tensor, maximum: Tensor, factor: Tensor, weight: Tensor, local: Tensor) -> None:
    """The gradient of the logits, written over them."""
    _launch(_gradient_in_place, logits, logits, maximum, factor, weight, local)
    # A second backward pass over what was written would be wrong: autograd sees it by this.
    torch.autograd.graph.increment_version(logits)


def _launch(kernel: Any, logits: Tensor, out: Tensor, *numbers: Tensor) -> None:
    rows, columns = logits.shape
    if logits.numel():
        kernel[lambda meta: (triton.cdiv(rows, meta["ROWS"]) * triton.cdiv(columns, meta["BLOCK"]),)](
            logits, out, *(one.contiguous() for one in numbers), rows, columns, logits.stride(0), out.stride(0),
            WIDE=wide_type(logits.dtype),
        )  # fmt: skip
