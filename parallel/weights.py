"""Fills the parameters of a module on any grid from wherever weights lie, each rank its own rows and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gridtron.core.communication import gather_values
from gridtron.core.errors import JobError
from gridtron.core.grid import Axis
from gridtron.core.pieces import Piece
from gridtron.parallel.data_parallel.fsdp import cuts_of, is_cut, local_part, shards_of
from gridtron.parallel.data_parallel.wrapper import DataParallel
from gridtron.parallel.parameters import NamedParameter, named_parameters

if TYPE_CHECKING:
    from gridtron.core.grid import Grid

_LISTED = 10


class WeightSource(Protocol):
    """Whole weights somewhere, of which a rank reads rectangles.

    Attributes:
        shapes: of every weight, by the name it has in the model of one process.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A rectangle of a weight, on the CPU."""
        ...


class HeldWeights:
    """Weights that are in memory, whole."""

    def __init__(self, state: Mapping[str, Tensor]):
        self.state = state
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        part = self.state[name]
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, start, size)
        return part


def load_weights(
    model: nn.Module,
    source: WeightSource,
    grid: Grid | None = None,
    named: str = "this state",
    strict: bool = True,
) -> tuple[list[str], list[str]]:
    """Puts each rank's rows of a source's weights into ``model``; nothing is changed where anything does not fit.

    Every pipeline rank of ``grid`` must call it: together they must know every name.

    Args:
        model: a module, or one wrapped by DataParallel.
        source: of all weights and no others.
        grid: the model's grid, where its stages lie on several pipeline ranks.
        named: what the source is, for messages.
        strict: False: parameters that the source lacks keep their values, and names that the model lacks are left out.

    Returns:
        Missing and unexpected names, on every rank alike; both empty where ``strict``.

    Raises:
        ValueError: a shape that differs and, where ``strict``, missing or unexpected names: all of them listed, on
            every rank alike.
    """
    axis = Axis("pipeline") if grid is None else grid.pipeline
    if isinstance(model, DataParallel):
        model.reshard()
    parameters = named_parameters(model)
    missing, unexpected = _check(parameters, source, axis, named, strict)
    with torch.no_grad():
        for item in parameters:
            if item.name in missing:
                continue
            tensor: Tensor = item.parameter
            piece = Piece(item.sharding, item.axis)
            if is_cut(item.parameter):
                piece = Piece(item.sharding, item.axis, cuts_of(item.parameter), shards_of(item.parameter))
                tensor = local_part(item.parameter)
            fill(tensor, piece, source, item.name)
    return missing, unexpected


def _check(
    parameters: list[NamedParameter], source: WeightSource, axis: Axis, named: str, strict: bool
) -> tuple[list[str], list[str]]:
    known = {item.name: item.sharding.shape for item in parameters}
    shapes = source.shapes
    differing = [
        f"{name} has shape {tuple(shapes[name])}, the model's is {shape}"
        for name, shape in known.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    lacking = [name for name in known if name not in shapes]
    gathered = gather_values((list(known), list(shapes), lacking, differing), axis)
    everywhere = {name for names, _, _, _ in gathered for name in names}
    given = dict.fromkeys(name for _, names, _, _ in gathered for name in names)
    missing = list(dict.fromkeys(name for _, _, names, _ in gathered for name in names))
    unexpected = [name for name in given if name not in everywhere]
    problems = list(dict.fromkeys(fault for _, _, _, faults in gathered for fault in faults))
    if strict:
        problems = [f"missing: {n}" for n in missing] + [f"unexpected: {n}" for n in unexpected] + problems
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        shown = "\n  ".join(problems[:_LISTED] + more)
        raise ValueError(f"{named} is not of this model:\n  {shown}")
    return missing, unexpected


def fill(tensor: Tensor, piece: Piece, source: WeightSource, name: str) -> None:
    """Reads what a rank keeps of one weight.

    Args:
        tensor: its memory, of ``piece.shape``; in its own dtype.
        piece: where it lies in the whole.
        source, name: the weight.
    """
    read: Callable[[tuple[int, ...], tuple[int, ...]], Tensor] = lambda *box: source.read(name, *box)  # noqa: E731
    shape = piece.sharding.shape
    if piece.cuts is not None:
        for (offsets, sizes), (low, high) in piece.boxes():
            tensor[low:high].view(sizes).copy_(read(offsets, sizes))
        return
    dim, rank = piece.sharding.dim, piece.axis.rank
    if dim is None:
        tensor.copy_(read((0,) * len(shape), shape))
        return
    for (start, stop), (low, high) in piece.sharding.local_slices(rank, piece.sharding.ranges(rank)):
        offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
        sizes = tuple(stop - start if d == dim else size for d, size in enumerate(shape))
        tensor.narrow(dim, low, high - low).copy_(read(offsets, sizes))


Opened = TypeVar("Opened")


def agree(open_source: Callable[[], Opened], grid: Grid | None) -> Opened:
    """What ``open_source`` gives; where it fails on any rank, every rank raises the same.

    Raises:
        JobError: the first rank's failure.
    """
    found, fault = None, None
    try:
        found = open_source()
    except (ValueError, JobError) as error:
        fault = str(error)
    told = [fault] if grid is None else gather_values(fault, grid.everyone("agreement"))
    fault = next((text for text in told if text is not None), None)
    if fault is not None or found is None:
        raise JobError(str(fault), agreed=True)
    return found
