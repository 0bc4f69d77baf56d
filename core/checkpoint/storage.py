"""Where the bytes go: DCP's StorageWriter and StorageReader without pickle, one safetensors file a rank."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from gridtron.core.checkpoint.layout import MANIFEST, move_into_place, remove_unfinished, unfinished_path
from gridtron.core.checkpoint.manifest import Manifest, Piece, TensorEntry, data_file, dtype_code, label_of
from gridtron.core.checkpoint.planning import Part, metadata_of
from gridtron.core.checkpoint.stored import OpenFile, Stored
from gridtron.core.checkpoint.stream import Item, write_items
from gridtron.core.files import Files, write_whole

if TYPE_CHECKING:
    from torch import Tensor


class Writer(StorageWriter):
    """Writes this rank's pieces aside; the coordinator adds the manifest and gives the folder its name.

    Args:
        path: the checkpoint's folder when it is complete.
        rank: global rank, in the name of the data file.
        extra: JSON values of the run.
        copies: parts that another rank writes too, and this one once more.
        files: the disk.
    """

    def __init__(self, path: Path, rank: int, extra: dict[str, Any], copies: Sequence[Part], files: Files):
        self.path = path
        self.folder = unfinished_path(path)
        self.file = data_file(rank)
        self.extra = extra
        self.copies = copies
        self.files = files

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self.path.parent, self.files)
            self.files.make_folder(self.folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts = [(_part(item, planner), False) for item in plan.items] + [(part, True) for part in self.copies]
        parts.sort(key=lambda found: found[0].order)
        results: list[WriteResult] = []
        if parts:
            items = [
                Item(label_of(part.name, part.offsets), dtype_code(part.tensor.dtype), part.sizes, _memory(part))
                for part, _ in parts
            ]
            written = write_items(self.folder / self.file, items, self.files)
            for (part, copied), place in zip(parts, written, strict=True):
                index = MetadataIndex(part.name, torch.Size(part.offsets))
                told = (self.file, place.start, place.checksums, copied)
                results.append(WriteResult(index, place.nbytes, told))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places: dict[MetadataIndex, WriteResult] = {}
        copies: dict[MetadataIndex, list[tuple[str, int]]] = defaultdict(list)
        sizes: dict[str, int] = defaultdict(int)
        for written in (written for of_rank in results for written in of_rank):
            file, start, _, copied = written.storage_data
            sizes[file] = max(sizes[file], start + written.size_in_bytes)
            if copied:
                copies[written.index].append((file, start))
            else:
                places[written.index] = written
        tensors = {}
        for name, saved in sorted(metadata.state_dict_metadata.items()):
            pieces = []
            for chunk in saved.chunks:  # type: ignore[union-attr]
                index = MetadataIndex(name, chunk.offsets)
                file, start, checksums, _ = places[index].storage_data
                box = (tuple(chunk.offsets), tuple(chunk.sizes))
                pieces.append(Piece(*box, file, start, checksums, tuple(copies[index])))
            code = dtype_code(saved.properties.dtype)  # type: ignore[union-attr]
            tensors[name] = TensorEntry(code, tuple(saved.size), tuple(pieces))  # type: ignore[union-attr]
        manifest = Manifest(tensors, dict(sizes), self.extra)
        write_whole(self.folder / MANIFEST, manifest.to_json(), self.files)
        move_into_place(self.folder, self.path, self.files)

    def discard(self) -> None:
        """Removes what was written, after a failure."""
        self.files.remove(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class Reader(StorageReader):
    """Reads pieces of a checkpoint into place; a rank opens only the files that hold rows of its own.

    Args:
        path: the checkpoint's folder.
        manifest: as read from it.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.stored = Stored(path, manifest)
        self.manifest = manifest
        self.pieces = {
            (name, piece.offsets): (entry, piece) for name, entry in manifest.tensors.items() for piece in entry.pieces
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return metadata_of(self.manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = defaultdict(list)
        for item in plan.items:
            assert item.storage_index.offset is not None
            _, piece = self.pieces[item.storage_index.fqn, tuple(item.storage_index.offset)]
            by_file[piece.file].append((item, piece))
        for name, items in by_file.items():
            with self.stored.open(name) as file:
                for item, piece in items:
                    self._copy(file, item, piece, planner)
        return _done(None)

    def _copy(self, file: OpenFile, item: ReadItem, piece: Piece, planner: LoadPlanner) -> None:
        target = planner.resolve_tensor(item)
        self.stored.copy_box(file, item.storage_index.fqn, piece, item.storage_offsets, target)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _part(item: WriteItem, planner: SavePlanner) -> Part:
    assert item.index.offset is not None
    return Part(item.index.fqn, tuple(item.index.offset), planner.resolve_data(item))  # type: ignore[arg-type]


def _memory(part: Part) -> Callable[[], Tensor]:
    return lambda: part.tensor


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
