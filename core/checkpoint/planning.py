"""Which piece of which tensor a rank writes and reads: torch.distributed.checkpoint's planners over our sharding.

DCP asks each value of a state for its pieces by three hooks; a :class:`ShardEntry` answers them from
:class:`Sharding`, whose rows need be neither even nor disjoint.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.checkpoint.manifest import DTYPES, FileOrder, Manifest, file_order
from gridtron.core.checkpoint.tensors import ShardedTensorView

if TYPE_CHECKING:
    from torch import Tensor

_LISTED = 6
"""Names shown in a message before the rest is counted."""


@dataclass(frozen=True)
class Part:
    """A box of a named tensor and the memory that holds it."""

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def order(self) -> FileOrder:
        return file_order(self.tensor.element_size(), self.sizes, self.name, self.offsets)


class ShardEntry:
    """A view as DCP sees it: not a tensor, but with the hooks it asks for.

    Args:
        view: the local tensor and its rows.
        writing: pieces are those this rank writes (each row once over the grid); else those it holds.
    """

    def __init__(self, view: ShardedTensorView, writing: bool):
        self.view = view
        self.pieces = _pieces(view, writing)

    def size(self) -> torch.Size:
        return torch.Size(self.view.sharding.shape)

    def __create_write_items__(self, name: str, value: ShardEntry) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.view.local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(tensor.shape)) for offsets, tensor in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, tensor in self.pieces:
            if index.offset is None or tuple(index.offset) == offsets:
                return tensor
        raise AssertionError(f"{index} is none of the pieces {[offsets for offsets, _ in self.pieces]}")


def _pieces(view: ShardedTensorView, writing: bool) -> list[tuple[tuple[int, ...], Tensor]]:
    """Offsets in the whole tensor and the local memory of each piece."""
    if not writing:
        return _boxes(view, owned=False)
    return _boxes(view, owned=True) if view.replica == 0 else []


def copied_parts(state: Mapping[str, ShardedTensorView], copies: int) -> list[Part]:
    """What this rank writes once more, where each row is to be written ``copies`` times by ranks that hold it."""
    views = {name: view for name, view in state.items() if 0 < view.replica < copies}
    return [Part(name, *box) for name, view in views.items() for box in _boxes(view, owned=True)]


def _boxes(view: ShardedTensorView, owned: bool) -> list[tuple[tuple[int, ...], Tensor]]:
    """Every box that the view holds; ``owned``: without rows that a lower rank of the axis holds too."""
    sharding, rank, local = view.sharding, view.axis_rank, view.local.detach()
    if view.piece is not None:
        boxes = view.piece.boxes(view.piece.counted() if owned and sharding.dim is not None else None)
        return [(offsets, local[start:stop].view(sizes)) for (offsets, sizes), (start, stop) in boxes]
    assert tuple(local.shape) == sharding.local_shape(rank), (tuple(local.shape), sharding, rank)
    if sharding.dim is None:
        return [((0,) * local.dim(), local)]
    wanted = sharding.owned(rank) if owned else sharding.ranges(rank)
    found = []
    for (start, _), (low, high) in sharding.local_slices(rank, wanted):
        offsets = tuple(start if dim == sharding.dim else 0 for dim in range(local.dim()))
        found.append((offsets, local.narrow(sharding.dim, low, high - low)))
    return found


class SavePlanner(DefaultSavePlanner):
    """DCP's planner over :class:`ShardEntry` values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner over :class:`ShardEntry` values; names, shapes and dtypes are compared over all ranks first.

    Args:
        manifest: of the checkpoint.
        where: it lies, for messages.
        strict: names that only one side has are an error; else they are in ``missing`` and ``unexpected``.
    """

    def __init__(self, manifest: Manifest, where: str, strict: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.manifest = manifest
        self.where = where
        self.strict = strict
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The base class would walk through the values and drop those that are no tensors.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        fitting, differing = {}, []
        for name, entry in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if isinstance(saved, TensorStorageMetadata):
                fault = _difference(name, saved, entry)
                if fault:
                    differing.append(fault)
                else:
                    fitting[name] = entry
        plan = create_default_local_load_plan(fitting, self.metadata)
        plan.planner_data = (list(self.state_dict), differing)
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        asked = {name for plan in global_plan for name in plan.planner_data[0]}
        saved = set(self.manifest.tensors)
        missing, unexpected = sorted(asked - saved), sorted(saved - asked)
        different = listing("different", {fault for plan in global_plan for fault in plan.planner_data[1]})
        if different or (self.strict and (missing or unexpected)):
            raise CheckpointError(
                f"the checkpoint {self.where} is not of this model and optimizer:\n  "
                + "\n  ".join([*left_out_names(missing, unexpected), *different]),
                agreed=True,
            )
        return [replace(plan, planner_data=(missing, unexpected)) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.missing, self.unexpected = map(tuple, new_plan.planner_data)
        return new_plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        raise AssertionError(f"{read_item.dest_index.fqn}: a checkpoint holds tensors only")


def metadata_of(manifest: Manifest) -> Metadata:
    """The manifest as DCP's planners take it."""
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, DTYPES[entry.dtype][0])),
            torch.Size(entry.shape),
            [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in entry.pieces],
        )
        for name, entry in manifest.tensors.items()
    }
    return Metadata(dict(tensors), storage_meta=StorageMeta())


def entries(state: Mapping[str, ShardedTensorView], writing: bool) -> dict[str, Any]:
    """A state as DCP takes it."""
    return {name: ShardEntry(view, writing) for name, view in state.items()}


def _difference(name: str, saved: TensorStorageMetadata, entry: ShardEntry) -> str | None:
    local = entry.view.local
    if tuple(saved.size) != tuple(entry.size()):
        return f"{name} has the shape {list(saved.size)} there and {list(entry.size())} here"
    if saved.properties.dtype.is_floating_point != local.dtype.is_floating_point:
        return f"{name} is {saved.properties.dtype} there and {local.dtype} here"
    return None


def left_out_names(missing: Collection[str], unexpected: Collection[str]) -> list[str]:
    """Names that only the run has, and names that only the checkpoint has, a line each where there are some."""
    return listing("not in the checkpoint", missing) + listing("in the checkpoint and not in this run", unexpected)


def listing(title: str, names: Collection[str]) -> list[str]:
    """One line over the first few names; none where there are none."""
    if not names:
        return []
    ordered = sorted(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return [f"{title}: {', '.join(ordered[:_LISTED])}{more}"]
