"""Elementwise chains on a CPU, a block of rows at a time: what one operation writes the next finds in the cache."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

_BYTES = 5 * 2**18
"""Of a block of all tensors together: with what else is at hand it fits in a second-level cache of two MiB."""


def row_blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The tensors' blocks of rows (their first dimension), together; all rows at once on a device, where a launch costs
    more than it saves, and while a compiler traces, which makes loops of its own."""
    first = tensors[0]
    rows = first.shape[0]
    if rows == 0 or first.device.type != "cpu" or torch.compiler.is_compiling():
        return (tensors,)
    width = sum([tensor.nbytes for tensor in tensors]) // rows
    size = max(1, _BYTES * torch.get_num_threads() // max(1, width))
    if size >= rows:
        return (tensors,)
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def as_rows(x: Float[Tensor, "*batch features"]) -> Float[Tensor, "rows features"]:
    """All dimensions but the last as one; of an empty tensor too, where -1 could not be inferred."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
