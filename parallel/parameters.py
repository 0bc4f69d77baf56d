"""The parameters of any module with their grid-independent names and shardings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gridtron.core.communication import all_reduce
from gridtron.core.grid import Axis
from gridtron.core.pieces import Piece
from gridtron.core.sharding import Sharding


@dataclass(frozen=True)
class NamedParameter:
    """One parameter, its name in the model of one process, and how it lies over which axis.

    ``copies`` are the ranks that hold the same rows of it under the same name because their stages share it: their
    gradients are summed, and the first of them stands for all in a norm and in a checkpoint. ``matrix``: it is the
    weight of a hidden product, neither of an embedding nor of a head.
    """

    name: str
    parameter: nn.Parameter
    sharding: Sharding
    axis: Axis
    copies: Axis | None = None
    matrix: bool = False

    @property
    def stands_for_all(self) -> bool:
        return self.copies is None or self.copies.rank == 0


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside wrappers that leave no trace in names: DataParallel, DistributedDataParallel, torch.compile."""
    while True:
        if getattr(model, "leaves_no_trace", False) or isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module  # type: ignore[assignment]
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def named_parameters(model: nn.Module, axis: Axis | None = None) -> list[NamedParameter]:
    """Every parameter once (a tied weight under its first name), in the order of the modules.

    A module states the shardings of its own parameters in ``module.shardings`` (name -> Sharding) over ``module.axis``;
    all others are whole on every rank of ``axis`` (default: of size 1). ``module.copies`` (name -> Axis) names the
    ranks that hold a parameter twice over the stages of a pipeline.
    """
    whole = axis or Axis("tensor")
    found: list[NamedParameter] = []
    seen: set[nn.Parameter] = set()

    def walk(module: nn.Module, prefix: str) -> None:
        inner = unwrap(module)
        shardings = getattr(inner, "shardings", {})
        for name, parameter in inner.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                sharding = shardings.get(name) or Sharding.whole(tuple(parameter.shape))
                over = inner.axis if name in shardings else whole
                assert isinstance(over, Axis), over
                copies = getattr(inner, "copies", {}).get(name)
                named = sharding.named(prefix + name)
                matrix = _is_matrix(inner, prefix, parameter)
                found.append(NamedParameter(prefix + name, parameter, named, over, copies, matrix))
        for name, child in inner.named_children():
            walk(child, f"{prefix}{name}.")

    walk(model, "")
    return found


_HEADS = ("head", "lm_head", "output", "classifier")


def _is_matrix(module: nn.Module, prefix: str, parameter: Tensor) -> bool:
    """By what a module says of its weights (``hidden_matrices``), else by its kind and the usual names of heads."""
    said = getattr(module, "hidden_matrices", None)
    if said is None:
        last = prefix.rstrip(".").rpartition(".")[2]
        said = not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and last not in _HEADS
    return bool(said) and parameter.ndim == 2


def sum_among_pieces(gradients: list[tuple[Tensor, Piece]]) -> None:
    """:func:`sum_among_holders` of the parts that ranks of ``shards`` keep.

    What is partial everywhere is cut in the same way on every rank of its axis, so that parts are summed as they are;
    rows that only some ranks hold lie elsewhere in each one's parts, which are put together first.
    """
    apart = [(gradient, piece) for gradient, piece in gradients if not piece.sharding.partial]
    together = [(gradient, piece, piece.gather(gradient)) for gradient, piece in apart]
    parts = [(gradient, piece.sharding, piece.axis) for gradient, piece in gradients if piece.sharding.partial]
    sum_among_holders(parts + [(whole, piece.sharding, piece.axis) for _, piece, whole in together])
    for gradient, piece, whole in together:
        if piece.cuts is not None:
            gradient.copy_(piece.take(whole))


def sum_among_holders(gradients: list[tuple[Tensor, Sharding, Axis]]) -> None:
    """In place: sums what each rank holds only a part of, because its Sharding says so.

    Two kinds: parameters whose gradient is partial on every rank, and rows (KV heads) that several ranks hold. One
    reduction an axis and dtype.
    """
    by_axis: dict[tuple[str, torch.dtype], list[tuple[Tensor, Sharding, Axis]]] = {}
    for gradient, sharding, axis in gradients:
        if axis.size > 1 and (sharding.partial or sharding.shared()):
            by_axis.setdefault((axis.name, gradient.dtype), []).append((gradient, sharding, axis))
    for group in by_axis.values():
        pieces = [_shared_part(*item) for item in group]
        flat = torch.cat([piece.flatten() for piece in pieces])
        if flat.numel():
            all_reduce(flat, group[0][2])
        parts = flat.split([piece.numel() for piece in pieces])
        for (gradient, sharding, axis), piece, part in zip(group, pieces, parts, strict=True):
            _write_shared_part(gradient, sharding, axis, part.view_as(piece))


def sum_among_copies(gradients: list[tuple[Tensor, Axis]]) -> None:
    """In place: the sum over the stages that share a parameter, one reduction each, in the order given."""
    for gradient, copies in gradients:
        if gradient.numel():
            all_reduce(gradient, copies)


def _shared_part(gradient: Tensor, sharding: Sharding, axis: Axis) -> Tensor:
    """What is to be summed: the whole gradient, or the rows that several ranks hold (zero where this one does not)."""
    if sharding.dim is None:
        return gradient
    dim, shared = sharding.dim, sharding.shared()
    length = sum(stop - start for start, stop in shared)
    part = gradient.new_zeros(*gradient.shape[:dim], length, *gradient.shape[dim + 1 :])
    for place, low, high in _shared_places(sharding, axis.rank):
        part.narrow(dim, place, high - low).copy_(gradient.narrow(dim, low, high - low))
    return part


def _write_shared_part(gradient: Tensor, sharding: Sharding, axis: Axis, part: Tensor) -> None:
    if sharding.dim is None:
        gradient.copy_(part)
        return
    for place, low, high in _shared_places(sharding, axis.rank):
        gradient.narrow(sharding.dim, low, high - low).copy_(part.narrow(sharding.dim, place, high - low))


def _shared_places(sharding: Sharding, rank: int) -> list[tuple[int, int, int]]:
    """(place among the shared rows, local start, local stop) of each shared run that ``rank`` holds."""
    shared = sharding.shared()
    found = []
    for (start, _), (low, high) in sharding.local_slices(rank, shared):
        before = sum(min(stop, start) - first for first, stop in shared if first < start)
        found.append((before, low, high))
    return found
