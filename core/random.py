"""Counted randomness: every random number is a function of (key, global index), never of a stream.

Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The key is a 64-bit hash of (seed,
purpose, global name); the counter is (element index // 4, sample index), the word is element index mod 4. So a rank
draws its own rows of a weight, or its own shard of a dropout mask, without drawing the others', and any grid draws
the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gridtron.core.sharding import Sharding

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
# Counters computed at once: the four int64 words and their two products stay inside the second-level cache.
_BLOCK = 16384


def random_key(seed: int, purpose: str, name: str) -> int:
    """A 64-bit key: the same on every machine and grid, distinct for distinct (seed, purpose, name)."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def draw_key() -> int:
    """One 64-bit key from torch's default CPU generator, for layers made by hand: ``torch.manual_seed`` governs it."""
    low, high = torch.randint(0, 2**32, (2,), dtype=torch.int64).tolist()
    return low | high << 32


def philox(counter: Sequence[Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10.

    Args:
        counter: four int64 tensors of one shape, each word in [0, 2^32).
        key: 64 bits, the low word first.

    Returns:
        Four int64 tensors of words in [0, 2^32).
    """
    c0, c1, c2, c3 = (word.clone(memory_format=torch.contiguous_format) for word in counter)
    k0, k1 = key & _MASK, key >> 32 & _MASK
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(10):
        # An int64 product wraps to the low 64 bits of the unsigned one: its halves are exact.
        torch.mul(c0, _MULTIPLIERS[0], out=p0)
        torch.mul(c2, _MULTIPLIERS[1], out=p1)
        torch.bitwise_right_shift(p1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(p0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        # The low halves are masked when next used, in the two lines above; the old words become scratch space.
        c1, p1 = p1, c1
        c3, p0 = p0, c3
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def _words(groups: Tensor, samples: Tensor | int, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words of the counters (group, sample); ``groups`` is element index // 4."""
    zero = torch.zeros_like(groups)
    sample = zero + samples
    return philox((groups & _MASK, groups >> 32, sample & _MASK, sample >> 32), key)


# ---------------------------------------------------------------- weights
def _uniform_block(groups: Tensor, key: int) -> Tensor:
    """(n,) groups -> (n, 4) float32 in [0, 1), each a multiple of 2^-24."""
    words = torch.stack(_words(groups, 0, key), dim=-1)
    return (words >> 8).to(torch.float32).mul_(2.0**-24)


def _normal_block(groups: Tensor, key: int) -> Tensor:
    """(n,) groups -> (n, 4) float32 standard normal numbers (Box and Muller 1958): words 0, 1 and words 2, 3."""
    w0, w1, w2, w3 = _words(groups, 0, key)
    out = torch.empty(*groups.shape, 4)
    for place, (radius_word, angle_word) in ((0, (w0, w1)), (2, (w2, w3))):
        radius = radius_word.to(torch.float32).add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        angle = angle_word.to(torch.float32).mul_(2 * math.pi * 2.0**-32)
        torch.mul(radius, torch.cos(angle), out=out[..., place])
        torch.mul(radius, torch.sin(angle), out=out[..., place + 1])
    return out


def _runs(sharding: Sharding, rank: int) -> tuple[list[tuple[int, int]], int, int]:
    """Contiguous runs of a rank's rows in the whole tensor's memory order.

    Returns:
        ((start, length) of the runs of the first outer index, the number of outer indices, the distance of two).
    """
    if sharding.dim is None:
        total = math.prod(sharding.shape)
        return [(0, total)] if total else [], 1, total
    inner = math.prod(sharding.shape[sharding.dim + 1 :])
    outer = math.prod(sharding.shape[: sharding.dim])
    runs = [(start * inner, (stop - start) * inner) for start, stop in sharding.ranges(rank)]
    return runs, outer, sharding.shape[sharding.dim] * inner


def _fill(tensor: Tensor, block, key: int, sharding: Sharding, rank: int, scale: float, shift: float) -> None:
    """Fills a rank's share with ``block(groups, key) * scale + shift``, bit for bit the whole tensor's rows."""
    if tensor.device.type == "meta":
        return
    assert tuple(tensor.shape) == sharding.local_shape(rank), (tuple(tensor.shape), sharding.local_shape(rank))
    runs, outer, distance = _runs(sharding, rank)
    width = sum(length for _, length in runs)
    # Always drawn on the CPU: a run's initial weights do not depend on the kind of device either.
    local = torch.empty(outer, width) if outer * width else torch.empty(0, 0)
    column = 0
    for start, length in runs:
        for row, low, values in _run_values(block, key, start, length, outer, distance):
            count = values.shape[1]
            local[row : row + values.shape[0], column + low : column + low + count] = values.mul_(scale).add_(shift)
        column += length
    with torch.no_grad():
        tensor.copy_(local.view(tensor.shape))


def _run_values(
    block, key: int, start: int, length: int, outer: int, distance: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Pieces (first outer index, first place in the run, values (rows, places)) that together cover a run."""
    span = (length + 3 + 3) // 4  # groups that a run can touch, wherever its start falls in its first group
    if span > _BLOCK or outer == 1:
        for row in range(outer):
            first = start + row * distance
            low = 0
            while low < length:
                skip = (first + low) % 4
                count = min(length - low, 4 * _BLOCK - skip)
                groups = (first + low) // 4 + torch.arange(_BLOCK)
                yield row, low, block(groups, key).view(1, -1)[:, skip : skip + count]
                low += count
        return
    rows = max(1, _BLOCK // span)
    for row in range(0, outer, rows):
        count = min(rows, outer - row)
        firsts = start + distance * torch.arange(row, row + count)
        groups = (firsts // 4).unsqueeze(1) + torch.arange(span)
        flat = torch.zeros(_BLOCK, dtype=torch.int64)
        flat[: groups.numel()] = groups.flatten()
        values = block(flat, key)[: groups.numel()].view(count, 4 * span)
        places = (firsts % 4).unsqueeze(1) + torch.arange(length)
        yield row, 0, values.gather(1, places)


def normal_(tensor: Tensor, key: int, sharding: Sharding, rank: int = 0, std: float = 1.0, mean: float = 0.0) -> None:
    """Fills a rank's share of a parameter with its rows of one normal weight; drawn in float32, then converted."""
    _fill(tensor, _normal_block, key, sharding, rank, std, mean)


def uniform_(tensor: Tensor, key: int, sharding: Sharding, rank: int = 0, low: float = 0.0, high: float = 1.0) -> None:
    """Fills a rank's share of a parameter with its rows of one uniform weight on [low, high)."""
    _fill(tensor, _uniform_block, key, sharding, rank, high - low, low)


# ---------------------------------------------------------------- dropout
def _element_groups(
    shape: Sequence[int], offsets: Sequence[int], strides: Sequence[int], rows: slice, device: torch.device
) -> Tensor:
    """Element indices inside the sample for rows ``rows`` of the first dimension; dims of stride 0 do not count."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (size, offset, stride) in enumerate(zip(shape, offsets, strides, strict=True)):
        places = torch.arange(size, device=device)
        if dim == 0:
            places = places[rows]
        index = index.unsqueeze(-1) + (places + offset) * stride
    return index


def dropout_threshold(p: float) -> int:
    """An element is kept where its word is at least this."""
    return math.floor(p * 2**32)


def shares_counters(shape: Sequence[int], sample_dim: int, offsets: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the four words of a counter belong to neighbours in memory; else each element draws its own counter."""
    last = len(shape) - 1
    return (
        sample_dim != last
        and strides[last] == 1
        and offsets[last] % 4 == 0
        and shape[last] % 4 == 0
        and all(stride % 4 == 0 for stride in strides[:last])
    )


def _keep_mask(
    shape: Sequence[int],
    threshold: int,
    key: int,
    samples: Tensor,
    sample_dim: int,
    offsets: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """(shape) bool, True where the element is kept: word >= threshold."""
    keep = torch.empty(tuple(shape), dtype=torch.bool, device=samples.device)
    if keep.numel() == 0:
        return keep
    last = len(shape) - 1
    packed = shares_counters(shape, sample_dim, offsets, strides)
    view = [1] * len(shape)
    view[sample_dim] = shape[sample_dim]
    sample = samples.view(view)
    if packed:
        shape = [*shape[:last], shape[last] // 4]
        offsets = [*offsets[:last], offsets[last] // 4]
        strides = [*(stride // 4 for stride in strides[:last]), 1]
    rows = max(1, _BLOCK * max(1, shape[0]) // max(1, math.prod(shape)))
    for first in range(0, shape[0], rows):
        part = slice(first, min(first + rows, shape[0]))
        index = _element_groups(shape, offsets, strides, part, samples.device)
        own = sample[part] if sample_dim == 0 else sample
        index, own = torch.broadcast_tensors(index, own)
        if packed:
            words = torch.stack(_words(index, own, key), dim=-1)
            keep[part] = (words >= threshold).flatten(-2)
        else:
            words = torch.stack(_words(index >> 2, own, key), dim=-1)
            keep[part] = words.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1) >= threshold
    return keep


@torch.library.custom_op("gridtron::counted_dropout", mutates_args=())
def counted_dropout(
    x: Tensor, p: float, key: int, samples: Tensor, sample_dim: int, offsets: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """Dropout whose mask is a function of (key, sample index, element index inside the sample).

    Args:
        x: any shape.
        p: probability of zero; the others are scaled by 1 / (1 - p).
        key: 64 bits, given as a signed integer (what an operator takes).
        samples: (x.shape[sample_dim],) int64 global sample indices.
        sample_dim: the dimension of x that runs over samples.
        offsets: global index of x's first element along each dimension (a shard's start).
        strides: distance, in the whole sample, of neighbours along each dimension; 0 for ``sample_dim``.
    """
    threshold = dropout_threshold(p)
    keep = _keep_mask(x.shape, threshold, key & 0xFFFFFFFFFFFFFFFF, samples, sample_dim, offsets, strides)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


@counted_dropout.register_fake
def _(x, p, key, samples, sample_dim, offsets, strides):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_dropout(ctx, inputs, output) -> None:
    _, ctx.p, ctx.key, samples, ctx.sample_dim, ctx.offsets, ctx.strides = inputs
    ctx.save_for_backward(samples)


def _dropout_backward(ctx, gradient):
    # The mask is drawn again, not kept: its bytes would be a quarter of the activation's.
    (samples,) = ctx.saved_tensors
    grad = counted_dropout(gradient, ctx.p, ctx.key, samples, ctx.sample_dim, ctx.offsets, ctx.strides)
    return grad, None, None, None, None, None, None


counted_dropout.register_autograd(_dropout_backward, setup_context=_save_dropout)


@torch.library.custom_op("gridtron::keyed_dropout", mutates_args=())
def keyed_dropout(
    x: Tensor, p: float, key: Tensor, samples: Tensor, sample_dim: int, offsets: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """:func:`counted_dropout` with its key in a tensor of one number on the CPU: a compiled graph takes one such key
    after another without being compiled anew."""
    return counted_dropout(x, p, int(key), samples, sample_dim, offsets, strides)


@keyed_dropout.register_fake
def _(x, p, key, samples, sample_dim, offsets, strides):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_keyed(ctx, inputs, output) -> None:
    _, ctx.p, key, samples, ctx.sample_dim, ctx.offsets, ctx.strides = inputs
    ctx.save_for_backward(key, samples)


def _keyed_backward(ctx, gradient):
    key, samples = ctx.saved_tensors
    grad = keyed_dropout(gradient, ctx.p, key, samples, ctx.sample_dim, ctx.offsets, ctx.strides)
    return grad, None, None, None, None, None, None


keyed_dropout.register_autograd(_keyed_backward, setup_context=_save_keyed)


def signed(key: int) -> int:
    """A 64-bit key as the signed integer that an operator takes."""
    return key - 2**64 if key >= 2**63 else key
