"""Muon: hidden matrices move by the orthogonal part of their momentum, everything else by AdamW.

Jordan et al. 2024 ("Muon: an optimizer for hidden layers in neural networks"), with decoupled weight decay and the
scaling of Liu et al. 2025 (arXiv:2502.16982, equation 4): an update of a (rows, columns) matrix is multiplied by
0.2 sqrt(max(rows, columns)), so that its root mean square is that of AdamW's, and AdamW's rate and decay carry over.

The orthogonal part is that of the *whole* matrix, whatever cuts it. The matrices that G ranks cut are taken in rounds
of G: each rank gets one whole, orthogonalises it and gives every other rank its part back. A rank holds one whole
matrix at a time, and no work is done twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gridtron.core.communication import exchange
from gridtron.core.grid import Axis
from gridtron.core.pieces import Piece, join_rows, take_rows

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan's quintic: steep at zero, and its fifth iterate takes singular values into about 0.7 to 1.2."""


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of a (rows, columns) matrix U S V^T, by Newton-Schulz steps in its own dtype; zero stays zero.

    X <- a X + (b A + c A^2) X with A = X X^T (Jordan et al. 2024): matrix products alone.
    """
    a, b, c = _COEFFICIENTS
    wide = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if wide else matrix
    x = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    for _ in range(steps):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x.mT if wide else x


def update_scale(shape: Sequence[int]) -> float:
    """0.2 sqrt(max(rows, columns)): Liu et al. 2025, arXiv:2502.16982, equation 4."""
    return 0.2 * math.sqrt(max(shape))


@dataclass(frozen=True)
class _Cut:
    """The ranks that cut a matrix: each of ``shards`` has a range of the rows of one rank of ``axis``."""

    shards: Axis
    axis: Axis

    @staticmethod
    def of(piece: Piece) -> _Cut:
        # An axis of one rank names that rank, and ranks would not agree which matrices are cut alike.
        shards = piece.shards if piece.cuts is not None and piece.shards.size > 1 else Axis("data")
        return _Cut(shards, piece.axis if piece.sharding.dim is not None and piece.axis.size > 1 else Axis("tensor"))

    @property
    def size(self) -> int:
        return self.shards.size * self.axis.size


class Muon:
    """Steps over main weights in the manner of a torch optimizer: ``param_groups``, ``state``, ``step()``.

    Args:
        matrices: a group of parameters that are whole hidden matrices, or this rank's parts of them; None: none here.
            Its keys: ``params``, ``weight_decay``, ``lr``, ``momentum``, ``ns_steps``, ``dtype`` (in which the steps
            are computed; None: the parameter's).
        pieces: where each of them lies in the whole. All ranks that cut a matrix have the same ones in the same order,
            with a gradient on all of them or on none.
        others: what updates everything else.
    """

    def __init__(
        self, matrices: dict[str, Any] | None, pieces: Mapping[Tensor, Piece], others: torch.optim.Optimizer | None
    ):
        self.matrices = matrices
        self.pieces = pieces
        self.others = others
        # One view of both, as of one optimizer: groups take their rate, checkpoints find states by parameter.
        self.state: dict[Tensor, dict[str, Any]] = {} if others is None else others.state
        self.param_groups = ([matrices] if matrices else []) + (others.param_groups if others else [])

    @torch.no_grad()
    def step(self) -> None:
        """One update, by the gradients in ``.grad``; parameters without one stay as they are."""
        if self.others is not None:
            self.others.step()
        if self.matrices is None:
            return
        by_cut: dict[_Cut, list[Tensor]] = {}
        for parameter in self.matrices["params"]:
            if parameter.grad is not None:
                by_cut.setdefault(_Cut.of(self.pieces[parameter]), []).append(parameter)
        for cut, parameters in by_cut.items():
            # Equal shapes share a round, so that its ranks end together; sorting is stable, the same on every rank.
            ordered = sorted(parameters, key=lambda p: _work(self.pieces[p].sharding.shape), reverse=True)
            for start in range(0, len(ordered), cut.size):
                self._round(cut, ordered[start : start + cut.size])

    def _round(self, cut: _Cut, parameters: Sequence[Tensor]) -> None:
        """Updates at most as many matrices as ranks cut them."""
        assert self.matrices is not None
        pieces = [self.pieces[parameter] for parameter in parameters]
        dtype = self.matrices.get("dtype")
        parts = [self._momentum(parameter).to(dtype or parameter.dtype) for parameter in parameters]
        updates = _orthogonal_parts(cut, parts, pieces, self.matrices["ns_steps"])
        lr, decay = self.matrices["lr"], self.matrices["weight_decay"]
        for parameter, update, piece in zip(parameters, updates, pieces, strict=True):
            parameter.mul_(1 - lr * decay)
            parameter.add_(update.to(parameter.dtype), alpha=-lr * update_scale(piece.sharding.shape))

    def _momentum(self, parameter: Tensor) -> Tensor:
        """Nesterov's: the running mean of gradients, and the gradient once more."""
        assert self.matrices is not None and parameter.grad is not None
        momentum, gradient = self.matrices["momentum"], parameter.grad
        if not momentum:
            return gradient
        buffer = self.state[parameter]["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def _work(shape: Sequence[int]) -> int:
    """Of the steps, but for a constant: products of the smaller side."""
    return min(shape) ** 2 * max(shape)


def _orthogonal_parts(cut: _Cut, parts: Sequence[Tensor], pieces: Sequence[Piece], steps: int) -> list[Tensor]:
    """This rank's parts of the orthogonalised matrices, from its parts of the matrices.

    Matrix number i is that of the rank (i // axis.size of the shards, i % axis.size of the axis). Parts travel over the
    shards first and make the rows of one rank of the axis; rows travel over the axis and make the whole.
    """
    shards, axis = cut.shards, cut.axis
    rows = _to_owners_of_rows(shards, axis.size, parts, pieces)
    mine = pieces[shards.rank * axis.size : (shards.rank + 1) * axis.size]
    wholes = _to_owner(axis, rows, mine)
    done = [orthogonalize(whole, steps) for whole in wholes]
    return _back_from_rows(shards, axis.size, _back_from_owner(axis, done, mine, parts[0]), parts, pieces)


def _spans(size: int, each: int, count: int) -> list[range]:
    """Which of ``count`` matrices belong to each of ``size`` ranks, ``each`` at most."""
    return [range(min(rank * each, count), min((rank + 1) * each, count)) for rank in range(size)]


def _cat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _to_owners_of_rows(shards: Axis, each: int, parts: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """This tensor rank's rows of the matrices that belong to this rank of the shards."""
    if shards.size == 1:
        return [piece.join([part]) for part, piece in zip(parts, pieces, strict=True)]
    spans = _spans(shards.size, each, len(parts))
    mine = [pieces[i] for i in spans[shards.rank]]
    sizes = [[_length(piece, rank) for piece in mine] for rank in range(shards.size)]
    sent = [_cat([parts[i] for i in span], parts[0]) for span in spans]
    received = exchange(sent, [sum(row) for row in sizes], shards)
    split = [tensor.split(row) for tensor, row in zip(received, sizes, strict=True)]
    return [piece.join([by_rank[i] for by_rank in split]) for i, piece in enumerate(mine)]


def _to_owner(axis: Axis, rows: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """The whole of the matrix that belongs to this rank of the axis, if there is one."""
    if axis.size == 1 or not pieces:
        return list(rows)
    owned = pieces[axis.rank : axis.rank + 1]
    sent = [_cat(rows[rank : rank + 1], rows[0]) for rank in range(axis.size)]
    shapes = [[piece.sharding.local_shape(rank) for piece in owned] for rank in range(axis.size)]
    received = exchange(sent, [sum(map(math.prod, row)) for row in shapes], axis)
    return [
        join_rows([tensor.view(row[0]) for tensor, row in zip(received, shapes, strict=True)], piece.sharding)
        for piece in owned
    ]


def _back_from_owner(axis: Axis, wholes: Sequence[Tensor], pieces: Sequence[Piece], like: Tensor) -> list[Tensor]:
    """:func:`_to_owner`, backwards."""
    if axis.size == 1 or not pieces:
        return list(wholes)
    owned = list(zip(wholes, pieces[axis.rank : axis.rank + 1], strict=True))
    sent = [_cat([take_rows(whole, piece.sharding, rank) for whole, piece in owned], like) for rank in range(axis.size)]
    shapes = [piece.local_shape for piece in pieces]
    lengths = [math.prod(shape) for shape in shapes] + [0] * (axis.size - len(shapes))
    received = exchange(sent, lengths, axis)
    return [tensor.view(shape) for tensor, shape in zip(received, shapes, strict=False)]


def _back_from_rows(
    shards: Axis, each: int, rows: Sequence[Tensor], parts: Sequence[Tensor], pieces: Sequence[Piece]
) -> list[Tensor]:
    """:func:`_to_owners_of_rows`, backwards."""
    if shards.size == 1:
        return [piece.take(tensor.contiguous()) for tensor, piece in zip(rows, pieces, strict=True)]
    spans = _spans(shards.size, each, len(parts))
    mine = list(zip(rows, (pieces[i] for i in spans[shards.rank]), strict=True))
    sent = []
    for rank in range(shards.size):
        cuts = [(tensor.reshape(-1), piece.cuts[rank]) for tensor, piece in mine if piece.cuts is not None]
        sent.append(_cat([flat[start:stop] for flat, (start, stop) in cuts], parts[0]))
    received = exchange(sent, [sum(parts[i].numel() for i in span) for span in spans], shards)
    by_rank = [tensor.split([parts[i].numel() for i in span]) for tensor, span in zip(received, spans, strict=True)]
    return [tensor for tensors in by_rank for tensor in tensors]


def _length(piece: Piece, rank: int) -> int:
    """Of the range that a rank of the shards updates."""
    assert piece.cuts is not None
    start, stop = piece.cuts[rank]
    return stop - start
