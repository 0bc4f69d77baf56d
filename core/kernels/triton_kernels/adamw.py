"""AdamW over many tensors in one launch: programs find their tensor in a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gridtron.core.kernels.triton_kernels.launch import wide_type

Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""(weight, gradient, exp_avg, exp_avg_sq, the model's narrow copy of the weight)."""

_FIELDS = 6
_BLOCK = 2048
# The interpreter takes milliseconds a program, whatever its size.
_INTERPRETED_BLOCK = 4096
_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _pointer(row, field: tl.constexpr, type: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + field).to(tl.pointer_type(type))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _updated(weight, gradient, mean, square, decay, rate, root, eps, first, beta2, second, WIDE: tl.constexpr):
    mean += (gradient - mean) * tl.full((), first, WIDE)
    square = square * tl.full((), beta2, WIDE) + gradient * gradient * tl.full((), second, WIDE)
    size = tl.sqrt(square) / tl.full((), root, WIDE) + tl.full((), eps, WIDE)
    return weight * tl.full((), decay, WIDE) - tl.full((), rate, WIDE) * mean / size, mean, square


@triton.jit
def _kernel(
    addresses, blocks, decay: tl.float64, rate: tl.float64, root: tl.float64, eps: tl.float64,
    first: tl.float64, beta2: tl.float64, second: tl.float64,
    GRADIENT: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr, FIELDS: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    own = blocks + tl.program_id(0).to(tl.int64) * 2
    row = addresses + tl.load(own) * FIELDS
    index = tl.load(own + 1) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(row + FIELDS - 1)
    weights = _pointer(row, 0, WIDE, ALIGNED) + index
    gradients = _pointer(row, 1, GRADIENT, ALIGNED) + index
    means = _pointer(row, 2, WIDE, ALIGNED) + index
    squares = _pointer(row, 3, WIDE, ALIGNED) + index
    if (tl.load(own + 1) + 1) * BLOCK <= numbers:
        # A whole block needs no mask: it is read and written in the widest words.
        weight, mean, square = _updated(
            tl.load(weights), tl.load(gradients).to(WIDE), tl.load(means), tl.load(squares),
            decay, rate, root, eps, first, beta2, second, WIDE,
        )  # fmt: skip
        tl.store(weights, weight)
        tl.store(means, mean)
        tl.store(squares, square)
        if COPY is not None:
            tl.store(_pointer(row, 4, COPY, ALIGNED) + index, weight.to(COPY))
    else:
        inside = index < numbers
        weight, mean, square = _updated(
            tl.load(weights, inside, 0.0), tl.load(gradients, inside, 0.0).to(WIDE),
            tl.load(means, inside, 0.0), tl.load(squares, inside, 0.0),
            decay, rate, root, eps, first, beta2, second, WIDE,
        )  # fmt: skip
        tl.store(weights, weight, inside)
        tl.store(means, mean, inside)
        tl.store(squares, square, inside)
        if COPY is not None:
            tl.store(_pointer(row, 4, COPY, ALIGNED) + index, weight.to(COPY), inside)


class Table:
    """Where the tensors of one launch lie, on their device.

    Args:
        rows: tensors of one device, weights and states of one wide dtype, gradients of one dtype, copies all or none
            and of one dtype; contiguous, of equal sizes in a row.
    """

    def __init__(self, rows: Sequence[Row]):
        weights, gradients, _, _, copies = zip(*rows, strict=True)
        self.wide, self.gradient = _one(weights), _one(gradients)
        self.copy = None if copies[0] is None else _one(copies)
        self.device = weights[0].device
        self.block = _INTERPRETED_BLOCK if triton.knobs.runtime.interpret else _BLOCK
        self.sizes = [weight.numel() for weight in weights]
        counts = torch.tensor([triton.cdiv(size, self.block) for size in self.sizes])
        owners = torch.repeat_interleave(torch.arange(len(rows)), counts)
        firsts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        self.programs = len(owners)
        self.blocks = torch.stack([owners, torch.arange(self.programs) - firsts], -1).to(self.device)
        self._kinds = _kinds(rows)
        self._found: list[list[int]] = []
        self.find(rows)

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether the tensors are as many, of the sizes and the dtypes of the table's."""
        return self._kinds == _kinds(rows)

    def find(self, rows: Sequence[Row]) -> None:
        """Notes where the tensors are now, if they are the table's; where they were costs nothing."""
        found = [[0 if tensor is None else tensor.data_ptr() for tensor in row] for row in rows]
        if found == self._found:
            return
        for size, row in zip(self.sizes, rows, strict=True):
            assert all(tensor is None or (tensor.is_contiguous() and tensor.numel() == size) for tensor in row)
        self._found = found
        self.aligned = all(address % 16 == 0 for row in found for address in row)
        table = [[*row, size] for row, size in zip(found, self.sizes, strict=True)]
        self.addresses = torch.tensor(table, dtype=torch.int64).to(self.device)


def _kinds(rows: Sequence[Row]) -> list[tuple[int, torch.dtype, torch.dtype | None]]:
    return [(row[0].numel(), row[1].dtype, None if row[4] is None else row[4].dtype) for row in rows]


def _one(tensors: Sequence[Tensor]) -> torch.dtype:
    (dtype,) = {tensor.dtype for tensor in tensors}
    return dtype


def update(
    addresses: Tensor, table: Table, decay: float, rate: float, root: float, eps: float, beta1: float, beta2: float
) -> None:
    """One step of every tensor.

    Args:
        addresses: those of the table.
        decay: what weights are multiplied by first.
        rate: the learning rate over the correction of the mean's bias.
        root: of the correction of the square's bias.
    """
    _kernel[(table.programs,)](
        addresses, table.blocks, decay, rate, root, eps, 1 - beta1, beta2, 1 - beta2,
        GRADIENT=_TYPES[table.gradient], COPY=None if table.copy is None else _TYPES[table.copy],
        ALIGNED=table.aligned, FIELDS=_FIELDS, BLOCK=table.block, WIDE=wide_type(table.wide), num_warps=4,
    )  # fmt: skip
