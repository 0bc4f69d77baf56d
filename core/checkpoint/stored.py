"""A checkpoint on the disk, read with every claim of its manifest checked; by one process, without a grid."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch

from gridtron.core.checkpoint.layout import MANIFEST, CheckpointError, open_regular
from gridtron.core.checkpoint.manifest import BLOCK, DTYPES, Manifest, Piece, Place, TensorEntry
from gridtron.core.checkpoint.stream import checksum

if TYPE_CHECKING:
    from torch import Tensor


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

    def names(self) -> list[str]:
        return list(self.manifest.tensors)

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, DTYPES[self.manifest.tensors[name].dtype][0])
        return dtype

    def tensor(self, name: str) -> Tensor:
        """One whole tensor, its bytes checked.

        Raises:
            CheckpointError: a file that is missing or damaged, by its name and the tensor's.
        """
        entry = self.manifest.tensors[name]
        whole = torch.empty(entry.shape, dtype=self.dtype(name))
        for piece in entry.pieces:
            with self.open(piece.file) as content:
                part = whole
                for dim, (start, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                    part = part.narrow(dim, start, size)
                if piece.numel:
                    part.copy_(self.box(content, name, piece))
        return whole

    def box(self, content: mmap.mmap, name: str, piece: Piece, first: int = 0, stop: int | None = None) -> Tensor:
        """The memory of a piece in its opened file, as a tensor; the blocks that hold its elements ``first`` to
        ``stop``, in row-major order, are checked."""
        entry = self.manifest.tensors[name]
        size = DTYPES[entry.dtype][1]
        blocks = range(first * size // BLOCK, -(-(piece.numel if stop is None else stop) * size // BLOCK))
        if self.damaged_blocks(content, entry, piece, (piece.file, piece.start), blocks):
            raise CheckpointError(self.damage(name, piece))
        flat = torch.frombuffer(content, dtype=self.dtype(name), count=piece.numel, offset=piece.start)
        return flat.view(piece.sizes)

    def damaged_blocks(
        self, content: mmap.mmap, entry: TensorEntry, piece: Piece, place: Place, blocks: range | None = None
    ) -> list[int]:
        """The blocks of a piece, at one of its places, whose bytes are not those that were written."""
        start, length = place[1], entry.bytes_of(piece)
        wrong = []
        with memoryview(content) as view:
            for number in range(len(piece.checksums)) if blocks is None else blocks:
                low, high = start + number * BLOCK, start + min((number + 1) * BLOCK, length)
                with view[low:high] as block:
                    if checksum(block) != piece.checksums[number]:
                        wrong.append(number)
        return wrong

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
    def open(self, name: str) -> Iterator[mmap.mmap]:
        """A data file in memory, after its size and its header were found to be what the manifest says.

        Raises:
            CheckpointError: they are not.
        """
        with open_regular(self.path / name) as file:
            self._check(name, file)
            # Tensors over it are copied from before it is closed; copy-on-write, since torch wants writable memory.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            try:
                yield content
            finally:
                with contextlib.suppress(BufferError):
                    content.close()

    def check_files(self) -> None:
        """Every data file is there, of the right size and with the right header; their data is not read.

        Raises:
            CheckpointError: by name.
        """
        for name in self.manifest.files:
            with open_regular(self.path / name) as file:
                self._check(name, file)

    def _check(self, name: str, file: BinaryIO) -> None:
        size, expected = os.fstat(file.fileno()).st_size, self.manifest.files[name]
        if size != expected:
            raise CheckpointError(
                f"{self.path / name} has {size} bytes and should have {expected}; use another checkpoint"
            )
        if name in self._begin_right:
            return
        header = self.manifest.header(name)
        if file.read(len(header)) != header:
            raise CheckpointError(
                f"{self.path / name} does not begin as {MANIFEST} says: it is damaged or another file, and nothing of "
                "it was used; use another checkpoint"
            )
        self._begin_right.add(name)
