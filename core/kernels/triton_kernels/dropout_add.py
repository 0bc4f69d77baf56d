"""Counted dropout and the residual's sum in one pass: the words of a counter are drawn in registers.

Philox 4x32-10 is Triton's own (``tl.philox``): its rounds are those of ``core.random``; its streams are not used.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from gridtron.core.kernels.backend import contiguous_like
from gridtron.core.kernels.triton_kernels.launch import flat_configurations, flat_grid, tuned, wide_type
from gridtron.core.random import dropout_threshold, shares_counters


@triton.jit
def _counter(
    index, samples, size1, size2, size3, offset0, offset1, offset2, offset3, stride0, stride1, stride2, stride3, inside,
    SAMPLE_DIM: tl.constexpr,
):  # fmt: skip
    """(element index inside the sample, sample index) of places in the memory order of four dimensions."""
    place3 = index % size3
    rest = index // size3
    place2 = rest % size2
    rest = rest // size2
    place1 = rest % size1
    place0 = rest // size1
    element = (place0.to(tl.int64) + offset0) * stride0 + (place1.to(tl.int64) + offset1) * stride1
    element += (place2.to(tl.int64) + offset2) * stride2 + (place3.to(tl.int64) + offset3) * stride3
    if SAMPLE_DIM == 0:
        place = place0
    elif SAMPLE_DIM == 1:
        place = place1
    elif SAMPLE_DIM == 2:
        place = place2
    else:
        place = place3
    return element, tl.load(samples + place, inside, 0)


@triton.jit(do_not_specialize=["key_low", "key_high", "threshold"])
def _kernel(
    x, residual, out, samples, numbers, key_low: tl.uint32, key_high: tl.uint32, threshold: tl.uint32,
    size1, size2, size3, offset0, offset1, offset2, offset3, stride0, stride1, stride2, stride3,
    SCALE: tl.constexpr, SAMPLE_DIM: tl.constexpr, PACKED: tl.constexpr, RESIDUAL: tl.constexpr,
    INDEX: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    low: tl.constexpr = 0xFFFFFFFF
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # One counter serves four neighbours, where they are neighbours in the sample too.
    SHARED: tl.constexpr = 4 if PACKED else 1
    first = (start + tl.arange(0, BLOCK // SHARED) * SHARED).to(INDEX)
    element, sample = _counter(
        first, samples, size1, size2, size3, offset0, offset1, offset2, offset3,
        stride0, stride1, stride2, stride3, first < numbers, SAMPLE_DIM,
    )  # fmt: skip
    group = element >> 2
    w0, w1, w2, w3 = tl.philox_impl(
        (group & low).to(tl.uint32), (group >> 32).to(tl.uint32),
        (sample & low).to(tl.uint32), (sample >> 32).to(tl.uint32),
        key_low.to(tl.uint32), key_high.to(tl.uint32),
    )  # fmt: skip
    if PACKED:
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    else:
        which = element & 3
        word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    index = start + tl.arange(0, BLOCK)
    inside = index < numbers
    values = (tl.load(x + index, inside, 0.0).to(WIDE) * SCALE).to(out.dtype.element_ty)
    result = tl.where(word >= threshold.to(tl.uint32), values, 0.0)
    if RESIDUAL:
        result = result.to(WIDE) + tl.load(residual + index, inside, 0.0).to(WIDE)
    tl.store(out + index, result, inside)


_dropout_add = tuned(_kernel, flat_configurations(), ["PACKED", "RESIDUAL", "SAMPLE_DIM"], {"BLOCK": 4096})


def _as_four(sizes: Sequence[int], filling: int) -> list[int]:
    """One to four numbers as four, filled up after the first: a dimension of size 1 there costs nothing."""
    return [sizes[0], *[filling] * (4 - len(sizes)), *sizes[1:]]


def dropout_add(
    x: Tensor,
    residual: Tensor | None,
    p: float,
    key: int,
    samples: Tensor,
    sample_dim: int,
    offsets: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """Counted dropout of x, and the residual added where there is one."""
    out = contiguous_like(x)
    if not x.numel():
        return out
    # Of one dimension or more: a scalar has no sample.
    dim = sample_dim if sample_dim == 0 else sample_dim + 4 - x.ndim
    flat = x.contiguous()
    _dropout_add[flat_grid(x.numel())](
        flat, flat if residual is None else residual.contiguous(), out, samples.contiguous(), x.numel(),
        key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF, dropout_threshold(p),
        *_as_four(x.shape, 1)[1:], *_as_four(offsets, 0), *_as_four(strides, 0),
        SCALE=1.0 / (1.0 - p), SAMPLE_DIM=dim, PACKED=shares_counters(x.shape, sample_dim, offsets, strides),
        RESIDUAL=residual is not None, INDEX=tl.int32 if x.numel() < 2**30 else tl.int64, WIDE=wide_type(x.dtype),
    )  # fmt: skip
    return out
