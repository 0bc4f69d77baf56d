"""Collectives over an Axis, without autograd, and the Ledger that counts them.

Every function returns at once on an axis of size 1: there None stands for the group, and None is never handed to
torch.distributed, where it would mean the world.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gridtron.core.grid import Axis
from gridtron.core.layout import AXIS_NAMES
from gridtron.core.torch_compat import TorchDispatchMode, all_gather_single, reduce_scatter_single

if TYPE_CHECKING:
    from gridtron.core.grid import Grid


class Pending(Protocol):
    """A collective that may still run: the tensor is ready after wait()."""

    def wait(self) -> Any: ...


class Done:
    """A collective that had nothing to do."""

    def wait(self) -> None:
        return None


def start_all_reduce(tensor: Tensor, axis: Axis, operation: str = "sum") -> Pending:
    """In place; ``operation`` is "sum", "max" or "min". The tensor must not be touched before wait()."""
    if axis.size == 1:
        return Done()
    reduction = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[operation]
    return dist.all_reduce(tensor, reduction, group=axis.group, async_op=True)


def all_reduce(tensor: Tensor, axis: Axis, operation: str = "sum") -> Tensor:
    """In place, and returned."""
    start_all_reduce(tensor, axis, operation).wait()
    return tensor


def start_all_gather(tensor: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """(n, ...) on every rank -> (axis.size * n, ...), in rank order."""
    if axis.size == 1:
        return tensor, Done()
    out = tensor.new_empty(axis.size * tensor.shape[0], *tensor.shape[1:])
    return out, all_gather_single(out, tensor.contiguous(), group=axis.group, async_op=True)


def all_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """(n, ...) on every rank -> (axis.size * n, ...), in rank order."""
    out, pending = start_all_gather(tensor, axis)
    pending.wait()
    return out


def start_reduce_scatter(tensor: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """(axis.size * n, ...) -> this rank's (n, ...) of the sum.

    Raises:
        ValueError: the first dimension does not divide by the axis.
    """
    if axis.size == 1:
        return tensor, Done()
    length, rest = divmod(tensor.shape[0], axis.size)
    if rest:
        raise ValueError(
            f"a first dimension (sequence) of {tensor.shape[0]} does not divide over {axis.name}={axis.size}; "
            f"nearest lengths: {length * axis.size}, {(length + 1) * axis.size}"
        )
    out = tensor.new_empty(length, *tensor.shape[1:])
    return out, start_reduce_scatter_into(out, tensor, axis)


def start_reduce_scatter_into(out: Tensor, tensor: Tensor, axis: Axis) -> Pending:
    """This rank's (n, ...) of the sum of (axis.size * n, ...), into ``out``, which is contiguous."""
    if axis.size == 1:
        out.copy_(tensor)
        return Done()
    return reduce_scatter_single(out, tensor.contiguous(), group=axis.group, async_op=True)


def reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """(axis.size * n, ...) -> this rank's (n, ...) of the sum."""
    out, pending = start_reduce_scatter(tensor, axis)
    pending.wait()
    return out


def all_gather_uneven(tensor: Tensor, lengths: Sequence[int], axis: Axis, dim: int = 0) -> list[Tensor]:
    """Every rank's tensor, whose sizes along ``dim`` are ``lengths``: padded to the longest, gathered, cut."""
    if axis.size == 1:
        return [tensor]
    longest = max(lengths)
    if longest == 0:
        return [tensor] * axis.size
    moved = tensor.movedim(dim, 0).contiguous()
    if moved.shape[0] < longest:
        moved = torch.cat([moved, moved.new_zeros(longest - moved.shape[0], *moved.shape[1:])])
    pieces = all_gather(moved, axis).split(longest)
    return [piece[:length].movedim(0, dim) for piece, length in zip(pieces, lengths, strict=True)]


def exchange(parts: Sequence[Tensor], lengths: Sequence[int], axis: Axis) -> list[Tensor]:
    """One-dimensional ``parts``, one for each rank of the axis, for those that each rank has for this one.

    Args:
        parts: to send, in rank order; of one dtype.
        lengths: of what comes back, in rank order.
    """
    if axis.size == 1:
        return list(parts)
    out = parts[0].new_empty(sum(lengths))
    sizes = [part.numel() for part in parts]
    dist.all_to_all_single(out, torch.cat(list(parts)), list(lengths), sizes, group=axis.group)
    return list(out.split(list(lengths)))


def broadcast_from_first(tensors: Sequence[Tensor], axis: Axis, chunk_bytes: int = 2**25) -> None:
    """In place: every rank's tensors become those of the axis's first rank; small ones travel together."""
    broadcast_from(tensors, axis, 0, chunk_bytes)


def broadcast_from(tensors: Sequence[Tensor], axis: Axis, source: int, chunk_bytes: int = 2**25) -> None:
    """In place: every rank's tensors become those of the rank at place ``source``; small ones travel together."""
    if axis.size == 1:
        return
    chunk: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        chunk.append(tensor)
        following = tensors[index + 1] if index + 1 < len(tensors) else None
        held = sum(item.numel() * item.element_size() for item in chunk)
        if following is not None and following.dtype == tensor.dtype and held < chunk_bytes:
            continue
        flat = torch.cat([item.flatten() for item in chunk])
        dist.broadcast(flat, src=axis.ranks[source], group=axis.group)
        with torch.no_grad():
            for item, part in zip(chunk, flat.split([item.numel() for item in chunk]), strict=True):
                item.copy_(part.view_as(item))
        chunk = []


def gather_values(value: Any, axis: Axis) -> list[Any]:
    """Every rank's ``value``, any small Python value, in rank order, on every rank."""
    if axis.size == 1:
        return [value]
    gathered: list[Any] = [None] * axis.size
    dist.all_gather_object(gathered, value, group=axis.group)
    return gathered


def start_send(tensor: Tensor, axis: Axis, target: int, tag: int = 0) -> Pending:
    """Starts sending to the rank at place ``target`` of the axis; the tensor must not be touched before wait().

    ``tag`` tells messages apart on Gloo; NCCL pairs them by their order.
    """
    return cast(Pending, dist.isend(tensor, group=axis.group, group_dst=target, tag=tag))


def start_receive(tensor: Tensor, axis: Axis, source: int, tag: int = 0) -> Pending:
    """Posts a receive into ``tensor`` from the rank at place ``source`` of the axis."""
    return cast(Pending, dist.irecv(tensor, group=axis.group, group_src=source, tag=tag))


def host_axis(axis: Axis) -> Axis:
    """The same ranks with a group for tensors on the CPU: the axis itself where its group is Gloo's.

    Every rank of the axis must call it at the same point.
    """
    if axis.size == 1 or "gloo" in dist.get_backend(axis.group):
        return axis
    group = dist.new_group(list(axis.ranks), backend="gloo", use_local_synchronization=True)
    return replace(axis, group=group)


def split_axis(axis: Axis, size: int) -> tuple[Axis, Axis]:
    """(inner, outer): groups of ``size`` neighbours on the axis, and the ranks of equal place in all those groups.

    Every rank of the axis must call it at the same point; ``size`` divides the axis.
    """
    assert size >= 1 and axis.size % size == 0, (size, axis.size)
    group, place = divmod(axis.rank, size)
    neighbours = axis.ranks[group * size : (group + 1) * size]
    peers = axis.ranks[place::size]
    inner = Axis(f"{axis.name}_shards", size, place, neighbours, _group_over(neighbours, axis))
    outer = Axis(f"{axis.name}_replicas", len(peers), group, peers, _group_over(peers, axis))
    axis.parts.extend((inner, outer))
    return inner, outer


def _group_over(ranks: tuple[int, ...], axis: Axis) -> Any:
    if len(ranks) == 1 or axis.group is None:
        return None
    if len(ranks) == axis.size:
        return axis.group
    return dist.new_group(list(ranks), use_local_synchronization=True)


def barrier(axis: Axis) -> None:
    """Returns once every rank of the axis has come here."""
    if axis.size > 1:
        dist.barrier(group=axis.group)


# ---------------------------------------------------------------- the ledger
@dataclass(frozen=True)
class Entry:
    """One collective as one rank started it: ``bytes`` are those of the larger of its input and its output."""

    axis: str
    operation: str
    bytes: int


# Schema names of c10d (in place) and of the functional collectives -> our name.
_OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
}


class Ledger(TorchDispatchMode):
    """Counts every collective that runs inside it, by axis and operation; no layer knows of it.

    Sees torch.distributed's own calls, the functional collectives, and those of FSDP2 and DTensor.

    Example:
        >>> with Ledger(grid) as ledger:
        ...     loss.backward()
        >>> ledger.calls("tensor", "all_reduce"), ledger.bytes("tensor")
    """

    def __init__(self, grid: Grid | None = None):
        super().__init__()
        self.entries: list[Entry] = []
        self._names: dict[str, str] = {}
        if grid is not None:
            for name in reversed(AXIS_NAMES):
                group = grid.axis(name).group
                if group is not None:
                    self._names.setdefault(group.group_name, name)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "symm_mem":
            return self._count_fused(function, args, kwargs or {})
        if function.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            operation = _OPERATIONS.get(function._schema.name.split("::")[1])
            if operation is not None:
                arguments = [*args, *(kwargs or {}).values()]
                result = function(*args, **(kwargs or {}))
                # c10d's have their outputs among the arguments, the functional ones return them.
                tensors = [*arguments, result] if function.namespace != "c10d" else arguments
                self.entries.append(Entry(self._axis_of(arguments), operation, _largest_bytes(tensors)))
                return result
        return function(*args, **(kwargs or {}))

    def _count_fused(self, function: Any, args: Any, kwargs: Any) -> Any:
        """torch's products with a collective inside, which below this mode shows no other operator."""
        result = function(*args, **kwargs)
        name, tensors = function._schema.name.split("::")[1], [value for value in args if isinstance(value, Tensor)]
        if name == "fused_all_gather_matmul":
            share, product = tensors[0], result[1][0]
            size = share.nbytes * product.shape[0] // share.shape[0]
            self.entries.append(Entry(self._axis_of(args), "all_gather", size))
        elif name == "fused_matmul_reduce_scatter":
            size = result.nbytes * tensors[0].shape[0] // result.shape[0]
            self.entries.append(Entry(self._axis_of(args), "reduce_scatter", size))
        return result

    def _axis_of(self, arguments: Sequence[Any]) -> str:
        for value in arguments:
            if isinstance(value, str) and (value in self._names or value.isdigit()):
                name = value
            elif isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                name = dist.ProcessGroup.unbox(value).group_name
            else:
                continue
            return self._names.get(name, name)
        return "world"

    def calls(self, axis: str | None = None, operation: str | None = None) -> int:
        """Number of collectives, of one axis and operation or of all."""
        return len(self._chosen(axis, operation))

    def bytes(self, axis: str | None = None, operation: str | None = None) -> int:
        """Bytes of those collectives on this rank (the larger of input and output of each)."""
        return sum(entry.bytes for entry in self._chosen(axis, operation))

    def _chosen(self, axis: str | None, operation: str | None) -> list[Entry]:
        return [e for e in self.entries if axis in (None, e.axis) and operation in (None, e.operation)]

    def table(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(axis, operation) -> (calls, bytes)."""
        rows: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
        for entry in self.entries:
            calls, size = rows[entry.axis, entry.operation]
            rows[entry.axis, entry.operation] = (calls + 1, size + entry.bytes)
        return dict(rows)


def _largest_bytes(arguments: Sequence[Any]) -> int:
    """Bytes of the largest tensor, or list of tensors, among the arguments."""
    sizes = [0]
    for value in arguments:
        if isinstance(value, Tensor):
            sizes.append(value.numel() * value.element_size())
        elif isinstance(value, (list, tuple)):
            flat = [item for inner in value for item in (inner if isinstance(inner, (list, tuple)) else [inner])]
            sizes.append(sum(item.numel() * item.element_size() for item in flat if isinstance(item, Tensor)))
    return max(sizes)
