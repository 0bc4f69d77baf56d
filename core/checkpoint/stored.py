"""A checkpoint on the disk, read with every claim of its manifest checked; by one process, without a grid."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gridtron.core.checkpoint.layout import MANIFEST, CheckpointError, open_regular
from gridtron.core.checkpoint.manifest import BLOCK, DTYPES, Manifest, Piece
from gridtron.core.checkpoint.stream import checksum, tensor_bytes
from gridtron.core.pieces import rectangles

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OpenFile:
    """A data file that is open for reading."""

    path: Path
    descriptor: int

    def read(self, start: int, target: memoryview) -> bool:
        """Fills ``target`` from byte ``start`` on; False where the file ends before.

        Raises:
            CheckpointError: the disk does not give the bytes.
        """
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self.descriptor, [target[done:]], start + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be read at byte {start + done}: {error.strerror}; use another checkpoint"
                ) from None
            if not count:
                return False
            done += count
        return True


class Stored:
    """The tensors of one complete checkpoint, under their grid-independent names.

    Args:
        path: folder of the checkpoint.
        manifest: as read from it; read here where it is not given.

    Raises:
        CheckpointError: a manifest that is missing, damaged or foreign.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None):
        self.path = path
        self.manifest = manifest or Manifest.read(path)
        self._begin_right: set[str] = set()
        self._block: Tensor | None = None

    def names(self) -> list[str]:
        return list(self.manifest.tensors)

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, DTYPES[self.manifest.tensors[name].dtype][0])
        return dtype

    def tensor(self, name: str) -> Tensor:
        """One whole tensor, its bytes checked; memory beside it: one block.

        Raises:
            CheckpointError: a file that is missing or damaged, by its name and the tensor's.
        """
        entry = self.manifest.tensors[name]
        # What is refused is refused before memory is asked for on the word of the manifest.
        for held in dict.fromkeys(piece.file for piece in entry.pieces):
            with self.open(held):
                pass
        try:
            whole = torch.empty(entry.shape, dtype=self.dtype(name))
        except (RuntimeError, MemoryError):
            raise CheckpointError(
                f"{self.path}: {name} of shape {list(entry.shape)} needs {entry.nbytes} bytes of memory, and there are "
                "not so many; use a machine with more"
            ) from None
        for piece in entry.pieces:
            part = whole
            for dim, (start, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            with self.open(piece.file) as file:
                self.copy_box(file, name, piece, (0,) * len(piece.sizes), part)
        return whole

    def copy_box(self, file: OpenFile, name: str, piece: Piece, offsets: Sequence[int], target: Tensor) -> None:
        """Copies the box of a piece that begins at ``offsets`` in it and has the shape of ``target`` there.

        Blocks that hold some of it are checked, no others. Where the box is a run of bytes, and the target's memory
        too, they are read into place; else by way of one block.

        Raises:
            CheckpointError: a checksum that differs; ``target`` is then filled in part.
        """
        if target.numel() == 0:
            return
        entry = self.manifest.tensors[name]
        size, length = DTYPES[entry.dtype][1], entry.bytes_of(piece)
        first, stop = _span(offsets, target.shape, piece.sizes)
        run = stop - first == target.numel() and target.is_contiguous() and target.device.type == "cpu"
        flat = tensor_bytes(target) if run and target.dtype == self.dtype(name) else None
        for number in range(first * size // BLOCK, -(-stop * size // BLOCK)):
            low, high = number * BLOCK, min((number + 1) * BLOCK, length)
            if flat is not None and first * size <= low and high <= stop * size:
                self._read_block(file, name, piece, number, flat[low - first * size : high - first * size])
                continue
            block = self._scratch()[: high - low]
            self._read_block(file, name, piece, number, tensor_bytes(block))
            elements = block.view(self.dtype(name))
            for corner, sizes, place in rectangles(piece.sizes, low // size, high // size):
                source = elements[place - low // size :][: math.prod(sizes)].view(sizes)
                _copy_common(source, corner, target, offsets)

    def _read_block(self, file: OpenFile, name: str, piece: Piece, number: int, target: memoryview) -> None:
        if not file.read(piece.start + number * BLOCK, target) or checksum(target) != piece.checksums[number]:
            raise CheckpointError(self.damage(name, piece))

    def _scratch(self) -> Tensor:
        if self._block is None:
            self._block = torch.empty(BLOCK, dtype=torch.uint8)
        return self._block

    def damage(self, name: str, piece: Piece) -> str:
        """What to tell of a piece whose bytes changed."""
        again = (
            f"; its bytes lie in {', '.join(file for file, _ in piece.copies)} as well: gridtron checkpoint verify "
            f"path={self.path} repair=true puts them back"
            if piece.copies
            else "; use another checkpoint"
        )
        return (
            f"{self.path / piece.file}: the bytes of {name} are not those that were written (checksum differs){again}"
        )

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        """A data file, after its size and its header were found to be what the manifest says.

        Raises:
            CheckpointError: they are not.
        """
        with open_regular(self.path / name) as file:
            opened = OpenFile(self.path / name, file.fileno())
            self.check_begin(opened)
            yield opened

    def check_files(self) -> None:
        """Every data file is there, of the right size and with the right header; their data is not read.

        Raises:
            CheckpointError: by name.
        """
        for name in self.manifest.files:
            with self.open(name):
                pass

    def check_begin(self, file: OpenFile) -> None:
        """Size and header of a data file.

        Raises:
            CheckpointError: they are not what the manifest says.
        """
        name = file.path.name
        size, expected = os.fstat(file.descriptor).st_size, self.manifest.files[name]
        if size != expected:
            raise CheckpointError(f"{file.path} has {size} bytes and should have {expected}; use another checkpoint")
        if name in self._begin_right:
            return
        header = self.manifest.header(name)
        begin = bytearray(len(header))
        if not file.read(0, memoryview(begin)) or begin != header:
            raise CheckpointError(
                f"{file.path} does not begin as {MANIFEST} says: it is damaged or another file, and nothing of "
                "it was used; use another checkpoint"
            )
        self._begin_right.add(name)


def _copy_common(source: Tensor, corner: Sequence[int], target: Tensor, offsets: Sequence[int]) -> None:
    """Copies what two boxes of one tensor, each at its place, have in common."""
    for dim, (low, begin) in enumerate(zip(corner, offsets, strict=True)):
        first, last = max(low, begin), min(low + source.shape[dim], begin + target.shape[dim])
        if first >= last:
            return
        source = source.narrow(dim, first - low, last - first)
        target = target.narrow(dim, first - begin, last - first)
    target.copy_(source)


def _span(offsets: Sequence[int], lengths: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """First and last (exclusive) element, in row-major order, of a box inside a box of ``sizes``."""
    first = last = 0
    for offset, length, size in zip(offsets, lengths, sizes, strict=True):
        first, last = first * size + offset, last * size + offset + length - 1
    return first, last + 1
