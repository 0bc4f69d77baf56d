"""Collectives of sequence parallelism behind the pieces of a matrix product (Wang et al. 2023, "Overlap communication
with dependent computation via decomposition", ASPLOS; Megatron's tensor-parallel communication overlap).

A share (n, ...) of the first dimension is cut into pieces. While the product of one piece is computed the next piece is
gathered, or the one before it is reduced and scattered. The rows of every product are those of the product that it
replaces, and every byte travels once, so results and traffic are the same; only the number of collectives grows.

Rows stand as a gather in one go leaves them: piece (start, stop) of rank r is rows r*n+start to r*n+stop of the whole.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

import torch
from jaxtyping import Float
from torch import Tensor

from gridtron.core.communication import (
    Done,
    Pending,
    all_gather,
    start_all_gather,
    start_reduce_scatter,
    start_reduce_scatter_into,
)
from gridtron.core.grid import Axis
from gridtron.core.kernels.blocks import as_rows
from gridtron.core.sharding import even_ranges
from gridtron.core.torch_compat import (
    fused_gather_products,
    fused_product_scatter,
    symmetric_memory_fault,
)

OVERLAPS = ("none", "chunked", "symmetric_memory")

# What cannot hide is the first piece's gather, or the last one's reduction: a quarter of the traffic. Twice the pieces
# would win another eighth and pay with the start of twice as many collectives and products.
_MOST_PIECES = 4
# Under this many rows a product no longer fills the tiles of a GPU's matrix units (128 by 128), nor a CPU's blocks.
_FEWEST_ROWS = 128


def overlap_fault(overlap: str, forward_sum: str = "in_place") -> str | None:
    """Why a layer cannot have this overlap, on this machine or with its other options; None where it can."""
    if overlap not in OVERLAPS:
        return f"overlap={overlap!r}: it is one of {', '.join(OVERLAPS)}"
    if overlap != "none" and forward_sum != "in_place":
        return f"overlap={overlap!r} goes with forward_sum='in_place' alone, and this is {forward_sum!r}"
    if overlap == "symmetric_memory" and (fault := symmetric_memory_fault()):
        return f"overlap='symmetric_memory': {fault}; nearest: overlap='chunked'"
    return None


def pieces_of(shape: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of the pieces of a share (n, ..., features): at most four, none of fewer than 128 rows.

    The same on every rank of the axis: it depends on what all of them have alike, not on features.

    Example:
        >>> pieces_of((1024, 2, 4096))
        [(0, 256), (256, 512), (512, 768), (768, 1024)]
    """
    length, rows = shape[0], torch.Size(shape[:-1]).numel()
    return even_ranges(length, max(1, min(_MOST_PIECES, rows // _FEWEST_ROWS, length)))


# ---------------------------------------------------------------- gather, then multiply
def gathered_products(
    share: Float[Tensor, "n *batch features"],
    factors: Sequence[tuple[Tensor, Tensor | None]],
    axis: Axis,
    overlap: str,
    keep: bool = False,
) -> tuple[Tensor | None, list[Tensor]]:
    """The gathered share times each matrix, plus its bias.

    Args:
        share: this rank's, of the first dimension.
        factors: (matrix (features, out), bias (out) or None).
        axis: of the gather, larger than 1.
        overlap: one of OVERLAPS.
        keep: return the gathered tensor too.

    Returns:
        (the gathered (axis.size * n, ..., features) or None, one (axis.size * n, ..., out) a matrix).
    """
    pieces = pieces_of(share.shape) if overlap == "chunked" else []
    if len(pieces) > 1:
        return _gathered_in_pieces(share, factors, axis, pieces, keep)
    if overlap == "symmetric_memory":
        whole, products = fused_gather_products(share.contiguous(), [matrix for matrix, _ in factors], axis.group, keep)
        for product, (_, bias) in zip(products, factors, strict=True):
            if bias is not None:
                product.add_(bias)
        return whole, products
    whole = all_gather(share, axis)
    products = [
        torch.matmul(whole, matrix) if bias is None else torch.nn.functional.linear(whole, matrix.t(), bias)
        for matrix, bias in factors
    ]
    return (whole if keep else None), products


def _gathered_in_pieces(
    share: Tensor,
    factors: Sequence[tuple[Tensor, Tensor | None]],
    axis: Axis,
    pieces: Sequence[tuple[int, int]],
    keep: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    n, middle = share.shape[0], share.shape[1:-1]
    whole = share.new_empty(axis.size, *share.shape) if keep else None
    products = [share.new_empty(axis.size, n, *middle, matrix.shape[1]) for matrix, _ in factors]
    with closing(_gather_in_turn(share, axis, pieces)) as gathered:
        for (start, stop), piece in gathered:
            if whole is not None:
                whole[:, start:stop].copy_(piece)
            for product, (matrix, bias) in zip(products, factors, strict=True):
                for rank in range(axis.size):
                    _multiply_into(product[rank, start:stop], piece[rank], matrix, bias)
    return (None if whole is None else whole.flatten(0, 1)), [product.flatten(0, 1) for product in products]


def _gather_in_turn(
    share: Tensor, axis: Axis, pieces: Sequence[tuple[int, int]]
) -> Generator[tuple[tuple[int, int], Tensor], None, None]:
    """Each piece with what all ranks have of it (axis.size, length, ...); the next one travels meanwhile."""
    # `pending` is never left behind: whoever stops in between (an error in a product) still waits for what travels.
    buffer, pending = start_all_gather(share[slice(*pieces[0])], axis)
    try:
        for index, (start, stop) in enumerate(pieces):
            ready = buffer
            pending.wait()
            pending = Done()
            if index + 1 < len(pieces):
                buffer, pending = start_all_gather(share[slice(*pieces[index + 1])], axis)
            yield (start, stop), ready.view(axis.size, stop - start, *share.shape[1:])
    finally:
        pending.wait()


def _multiply_into(out: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None = None, add: bool = False) -> None:
    """``out (..., out) = x (..., features) @ matrix (features, out)``, plus the bias, or added to what is there."""
    # A view: what is written to a copy would be lost.
    out, x = out.view(out.shape[:-1].numel(), out.shape[-1]), as_rows(x)
    if add:
        torch.addmm(out, x, matrix, out=out)
    elif bias is not None:
        torch.addmm(bias, x, matrix, out=out)
    else:
        torch.mm(x, matrix, out=out)


# ---------------------------------------------------------------- multiply, then reduce and scatter
def scattered_products(
    factors: Sequence[tuple[Tensor, Tensor]], axis: Axis, overlap: str
) -> tuple[Float[Tensor, "n *batch out"], Pending]:
    """This rank's share of the first dimension of the sum, over the axis and over ``factors``, of products.

    Args:
        factors: (x (axis.size * n, ..., features), matrix (features, out)).
        axis: of the reduction, larger than 1.
        overlap: one of OVERLAPS.

    Returns:
        (the share, ready after wait()).

    Raises:
        ValueError: the first dimension does not divide by the axis.
    """
    x, matrix = factors[0]
    if overlap != "none" and x.shape[0] % axis.size == 0:
        if overlap == "symmetric_memory" and len(factors) == 1:
            return fused_product_scatter(x.contiguous(), matrix, axis.group), Done()
        # The fused operator takes one product; a sum of several goes in pieces on any device.
        pieces = pieces_of((x.shape[0] // axis.size, *x.shape[1:]))
        if len(pieces) > 1:
            return _scattered_in_pieces(factors, axis, pieces)
    whole = torch.matmul(x, matrix)
    for x, matrix in factors[1:]:
        _multiply_into(whole, x, matrix, add=True)
    return start_reduce_scatter(whole, axis)


def _scattered_in_pieces(
    factors: Sequence[tuple[Tensor, Tensor]], axis: Axis, pieces: Sequence[tuple[int, int]]
) -> tuple[Tensor, Pending]:
    first, matrix = factors[0]
    n, middle = first.shape[0] // axis.size, first.shape[1:-1]
    share = first.new_empty(n, *middle, matrix.shape[1])
    split = [(x.reshape(axis.size, n, *x.shape[1:]), matrix) for x, matrix in factors]
    pending: Pending = Done()
    try:
        for start, stop in pieces:
            whole = share.new_empty(axis.size * (stop - start), *share.shape[1:])
            for rank, out in enumerate(whole.chunk(axis.size)):
                for index, (x, matrix) in enumerate(split):
                    _multiply_into(out, x[rank, start:stop], matrix, add=index > 0)
            # Two pieces exist at once, no more: the one that travels and the one that is computed.
            before, pending = pending, Done()
            before.wait()
            pending = start_reduce_scatter_into(share[start:stop], whole, axis)
    except BaseException:
        pending.wait()
        raise
    return share, pending
