"""Where the bytes go: DCP's StorageWriter and StorageReader without pickle, one safetensors file a rank."""

from __future__ import annotations

import mmap
import os
import shutil
import zlib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from gridtron.core.checkpoint.layout import (
    MANIFEST,
    CheckpointError,
    move_into_place,
    open_regular,
    remove_unfinished,
    unfinished_path,
    write_whole,
)
from gridtron.core.checkpoint.manifest import DTYPES, Manifest, Piece, TensorEntry, dtype_code, header_bytes
from gridtron.core.checkpoint.planning import metadata_of

if TYPE_CHECKING:
    from torch import Tensor


class Writer(StorageWriter):
    """Writes this rank's pieces aside; the coordinator adds the manifest and gives the folder its name.

    Args:
        path: the checkpoint's folder when it is complete.
        rank: global rank, in the name of the data file.
        extra: JSON values of the run.
    """

    def __init__(self, path: Path, rank: int, extra: dict[str, Any]):
        self.path = path
        self.folder = unfinished_path(path)
        self.file = f"rank-{rank:05d}.safetensors"
        self.extra = extra

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self.path.parent)
            self.folder.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        if plan.items:
            items = sorted(plan.items, key=_file_order)
            header = header_bytes([_box(item) for item in items])
            with open_for_writing(self.folder / self.file) as file:
                file.write(header)
                position = len(header)
                for item in items:
                    content = tensor_bytes(planner.resolve_data(item))  # type: ignore[arg-type]
                    file.write(content)
                    place = (self.file, position, zlib.crc32(content))
                    written.append(WriteResult(item.index, content.nbytes, place))
                    position += content.nbytes
                file.flush()
                os.fsync(file.fileno())
        return _done(written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {written.index: written for of_rank in results for written in of_rank}
        sizes: dict[str, int] = defaultdict(int)
        for written in places.values():
            file, start, _ = written.storage_data
            sizes[file] = max(sizes[file], start + written.size_in_bytes)
        tensors = {}
        for name, saved in sorted(metadata.state_dict_metadata.items()):
            pieces = []
            for chunk in saved.chunks:  # type: ignore[union-attr]
                place = places[MetadataIndex(name, chunk.offsets)].storage_data
                pieces.append(Piece(tuple(chunk.offsets), tuple(chunk.sizes), *place))
            code = dtype_code(saved.properties.dtype)  # type: ignore[union-attr]
            tensors[name] = TensorEntry(code, tuple(saved.size), tuple(pieces))  # type: ignore[union-attr]
        manifest = Manifest(tensors, dict(sizes), self.extra)
        write_whole(self.folder / MANIFEST, manifest.to_json())
        move_into_place(self.folder, self.path)

    def discard(self) -> None:
        """Removes what was written, after a failure."""
        shutil.rmtree(self.folder, ignore_errors=True)

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
        self.path = path
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
            entry, piece = self.pieces[item.storage_index.fqn, tuple(item.storage_index.offset)]
            by_file[piece.file].append((item, entry, piece))
        for name, items in by_file.items():
            with open_regular(self.path / name) as file:
                self._check_file(name, file)
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
                    for item, entry, piece in items:
                        self._copy(content, item, entry, piece, planner)
        return _done(None)

    def _check_file(self, name: str, file: BinaryIO) -> None:
        size, expected = os.fstat(file.fileno()).st_size, self.manifest.files[name]
        if size != expected:
            raise CheckpointError(
                f"{self.path / name} has {size} bytes and should have {expected}; use another checkpoint"
            )
        header = self.manifest.header(name)
        if file.read(len(header)) != header:
            raise CheckpointError(
                f"{self.path / name} does not begin as {MANIFEST} says: it is damaged or another file, and nothing of "
                "it was used; use another checkpoint"
            )

    def _copy(self, content: mmap.mmap, item: Any, entry: TensorEntry, piece: Piece, planner: LoadPlanner) -> None:
        length = entry.bytes_of(piece)
        if length == 0:
            return
        whole = tuple(item.lengths) == piece.sizes
        if whole:
            with memoryview(content) as view, view[piece.start : piece.start + length] as part:
                if zlib.crc32(part) != piece.crc32:
                    raise CheckpointError(
                        f"{self.path / piece.file}: the bytes of {item.storage_index.fqn} are not those that were "
                        "written (checksum differs); use another checkpoint"
                    )
        dtype = getattr(torch, DTYPES[entry.dtype][0])
        saved = torch.frombuffer(content, dtype=dtype, count=piece.numel, offset=piece.start).view(piece.sizes)
        for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            saved = saved.narrow(dim, start, size)
        target = planner.resolve_tensor(item)
        with torch.no_grad():
            target.copy_(saved)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def open_for_writing(path: Path) -> BinaryIO:
    """A new file; one that exists is an error, since two writers would spoil each other's."""
    return open(path, "xb")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order, as bytes; copied only from a device or from strided memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _box(item: WriteItem) -> tuple[str, str, tuple[int, ...], tuple[int, ...]]:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return item.index.fqn, dtype_code(item.tensor_data.properties.dtype), tuple(chunk.offsets), tuple(chunk.sizes)


def _file_order(item: WriteItem) -> tuple[int, bool, str, tuple[int, ...]]:
    name, code, offsets, sizes = _box(item)
    return -DTYPES[code][1], 0 not in sizes, name, offsets


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
