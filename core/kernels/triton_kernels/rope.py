"""Rotary positions: both halves of a head are read once; a program turns many heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gridtron.core.kernels.triton_kernels.launch import tuned, wide_type


@triton.jit
def _kernel(
    x, cos, sin, out, rows, batch, heads, half, rest,
    x_batch, x_head, x_place, x_width, out_batch, out_head, out_place, out_width, cos_place, sin_place,
    BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Heads of a position come one after the other, as they mostly do in memory: they share their angles.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = row % heads
    sample = row // heads % batch
    place = row // heads // batch
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < half)
    start = x + sample * x_batch + head * x_head + place * x_place
    target = out + sample * out_batch + head * out_head + place * out_place
    first = tl.load(start + column * x_width, inside, 0.0).to(WIDE)
    second = tl.load(start + (column + half) * x_width, inside, 0.0).to(WIDE)
    c = tl.load(cos + place * cos_place + column, inside, 0.0).to(WIDE)
    s = tl.load(sin + place * sin_place + column, inside, 0.0).to(WIDE)
    if BACK:
        s = -s
    tl.store(target + column * out_width, first * c - second * s, inside)
    tl.store(target + (column + half) * out_width, second * c + first * s, inside)
    if REST > 0:
        more = tl.arange(0, REST)[None, :]
        kept = (row < rows) & (more < rest)
        values = tl.load(start + (more + 2 * half) * x_width, kept, 0.0)
        tl.store(target + (more + 2 * half) * out_width, values, kept)


_CONFIGURATIONS = [
    triton.Config({"ROWS": rows}, num_warps=warps) for rows, warps in ((8, 2), (16, 4), (32, 4), (32, 8), (64, 8))
]
_turn = tuned(_kernel, _CONFIGURATIONS, ["half", "rest"], {"ROWS": 256})


def turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """x turned by the angles, or back by them."""
    out = torch.empty_like(x)
    if not x.numel():
        return out
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    batch, heads, length, width = x.shape
    half = cos.shape[-1]
    rest = width - 2 * half
    rows = batch * heads * length
    _turn[lambda meta: (triton.cdiv(rows, meta["ROWS"]),)](
        x, cos, sin, out, rows, batch, heads, half, rest, *x.stride(), *out.stride(), cos.stride(0), sin.stride(0),
        BACK=back, COLUMNS=triton.next_power_of_2(max(half, 1)), REST=triton.next_power_of_2(rest) if rest else 0,
        WIDE=wide_type(x.dtype),
    )  # fmt: skip
    return out
