"""What a checkpoint holds, as JSON: read as data, checked in every number, never executed.

Data files are in the safetensors format, and their headers are a function of the manifest: a file whose first bytes
are not exactly that header is refused. The manifest begins with the checksum of all its bytes after that line.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.checkpoint.layout import MANIFEST, CheckpointError, open_regular
from gridtron.core.checkpoint.sealed import SMALL, check_size, seal, unsealed

if TYPE_CHECKING:
    import torch

FORMAT = "gridtron-checkpoint"
VERSION = 2
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
DATA_FILE = re.compile(r"rank-[0-9]{5,12}\.safetensors")
ALIGNMENT = 64
"""Bytes: where the data begins in a data file. Pieces follow without gaps, wider elements first, so each is aligned."""
BLOCK = 1 << 24
"""Bytes of a piece under one checksum: a rank that reads a part of a piece checks the blocks it touches, no more."""
_LONGEST_NAME = 1000
_MOST_DIMS = 32
_MOST_SPLIT_DIMS = 5

DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""safetensors' code -> torch's name and bytes an element."""


def data_file(number: int) -> str:
    """The name of a data file: of a rank, or counted from 0 where one process wrote several."""
    return f"rank-{number:05d}.safetensors"


def dtype_code(dtype: torch.dtype) -> str:
    """safetensors' code of a dtype.

    Raises:
        CheckpointError: a dtype without one.
    """
    name = str(dtype).removeprefix("torch.")
    for code, (torch_name, _) in DTYPES.items():
        if torch_name == name:
            return code
    raise CheckpointError(f"a checkpoint cannot hold {name}; it holds {', '.join(name for name, _ in DTYPES.values())}")


Place = tuple[str, int]
"""Name of a data file, and the first byte in it."""


@dataclass(frozen=True)
class Piece:
    """A box of one tensor and where its bytes lie.

    Args:
        offsets, sizes: of the box, along each dimension of the whole tensor.
        file: name of the data file.
        start: first byte in that file.
        checksums: XXH3 (64 bits, hexadecimal) of each :data:`BLOCK` of its bytes, the last one shorter.
        copies: where the same bytes lie again, written by ranks that hold the same rows.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    checksums: tuple[str, ...]
    copies: tuple[Place, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def places(self) -> tuple[Place, ...]:
        return ((self.file, self.start), *self.copies)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: safetensors' code of its dtype, its whole shape, its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def bytes_of(self, piece: Piece) -> int:
        return piece.numel * DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint: tensors by name, sizes of the data files in bytes, and the run's own values."""

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, int]
    extra: Mapping[str, Any]

    def to_json(self) -> bytes:
        """The manifest's file.

        Raises:
            CheckpointError: it would be so large that it could not be read again.
        """
        content = {
            "format": FORMAT,
            "version": VERSION,
            "extra": dict(self.extra),
            "files": dict(self.files),
            "tensors": {
                name: {
                    "dtype": entry.dtype,
                    "shape": entry.shape,
                    "pieces": [_described(piece) for piece in entry.pieces],
                }
                for name, entry in self.tensors.items()
            },
        }
        sealed = seal(content)
        check_size(len(sealed), self.files.values(), "the manifest")
        return sealed

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of the checkpoint in ``folder``, with every number checked.

        Raises:
            CheckpointError: naming the file and what is wrong with it.
        """
        path = folder / MANIFEST
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            check_size(size, _data_sizes(folder) if size > SMALL else (), str(path))
            try:
                content = file.read(size + 1)
            except (OSError, MemoryError) as error:
                reason = error.strerror if isinstance(error, OSError) else "there is not so much memory"
                raise CheckpointError(f"{path} cannot be read: {reason}; use another checkpoint") from None
        try:
            return _parse(unsealed(content))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
            reason = f"no key {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
            raise CheckpointError(
                f"{path} is not the manifest of a checkpoint ({reason[:200]}); it is damaged or was written by "
                "something else, and nothing of it was used; use another checkpoint"
            ) from None

    def header(self, file: str) -> bytes:
        """The first bytes of a data file: safetensors' header over the pieces in it."""
        placed = self.places(file)
        return header_bytes([(label_of(n, p.offsets), self.tensors[n].dtype, p.sizes) for _, n, p in placed])

    def places(self, file: str) -> Sequence[tuple[int, str, Piece]]:
        """(first byte, tensor's name, piece) of all that lies in a data file, in its order."""
        return self._by_file.get(file, ())

    @cached_property
    def _by_file(self) -> Mapping[str, Sequence[tuple[int, str, Piece]]]:
        placed: dict[str, list[tuple[int, str, Piece]]] = defaultdict(list)
        for name, entry in self.tensors.items():
            for piece in entry.pieces:
                for file, start in piece.places:
                    placed[file].append((start, name, piece))

        def order(item: tuple[int, str, Piece]) -> tuple[int, FileOrder]:
            start, name, piece = item  # empty pieces begin where the next one does
            return start, file_order(DTYPES[self.tensors[name].dtype][1], piece.sizes, name, piece.offsets)

        return {file: sorted(items, key=order) for file, items in placed.items()}


FileOrder = tuple[int, bool, str, tuple[int, ...]]


def file_order(itemsize: int, sizes: tuple[int, ...], name: str, offsets: tuple[int, ...] = ()) -> FileOrder:
    """How pieces follow one another in a data file: wider elements first, so that each begins at a multiple of its
    element; the empty ones of a width before the others."""
    return -itemsize, 0 not in sizes, name, offsets


Labelled = tuple[str, str, tuple[int, ...]]
"""A tensor's name in a safetensors file, safetensors' code of its dtype, its shape there."""


def label_of(name: str, offsets: Sequence[int]) -> str:
    """The name of a piece in a data file."""
    return f"{name}@{','.join(map(str, offsets))}"


def header_bytes(tensors: Sequence[Labelled], metadata: Mapping[str, str] | None = None) -> bytes:
    """safetensors' header over tensors that follow one another: 8 bytes of length, then JSON, padded with blanks to
    ALIGNMENT. Its places count from its own end."""
    described: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for label, code, sizes in tensors:
        stop = position + math.prod(sizes) * DTYPES[code][1]
        described[label] = {"dtype": code, "shape": sizes, "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % ALIGNMENT
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def _data_sizes(folder: Path) -> list[int]:
    """Bytes on the disk of each data file: holes in a file do not count."""
    return [
        entry.stat(follow_symlinks=False).st_blocks * 512
        for entry in os.scandir(folder)
        if DATA_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
    ]


def _described(piece: Piece) -> dict[str, Any]:
    described: dict[str, Any] = {
        "offsets": piece.offsets,
        "sizes": piece.sizes,
        "file": piece.file,
        "start": piece.start,
        "xxh3": piece.checksums,
    }
    return described | {"copies": piece.copies} if piece.copies else described


def _parse(content: Any) -> Manifest:
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')!r} and should be {FORMAT!r}")
    if content["version"] != VERSION:
        raise ValueError(f"its version is {content['version']!r} and this program reads {VERSION}")
    files = {}
    for name, size in content["files"].items():
        if not DATA_FILE.fullmatch(name):
            raise ValueError(f"the data file {name!r} should be named like rank-00000.safetensors")
        files[name] = _natural(size, f"size of {name}")
    tensors = {name: _parse_tensor(name, entry, files) for name, entry in content["tensors"].items()}
    if not isinstance(content["extra"], dict):
        raise ValueError("extra is not an object")
    _check_files(tensors, files)
    return Manifest(tensors, files, content["extra"])


def _check_files(tensors: Mapping[str, TensorEntry], files: Mapping[str, int]) -> None:
    """In each data file the pieces follow one another to its end: every byte after the header is under one checksum."""
    placed: dict[str, list[tuple[int, int, str]]] = {file: [] for file in files}
    for name, entry in tensors.items():
        for piece in entry.pieces:
            for file, start in piece.places:
                placed[file].append((start, start + entry.bytes_of(piece), name))
    for file, places in placed.items():
        if not places:
            raise ValueError(f"nothing lies in {file}")
        places.sort()
        for (_, stop, name), (start, _, following) in itertools.pairwise(places):
            if start != stop:
                raise ValueError(f"{name} ends at byte {stop} of {file} and {following} begins at {start}")
        if places[-1][1] != files[file]:
            raise ValueError(f"{file} should end at byte {places[-1][1]} with {places[-1][2]}, and has {files[file]}")


def _parse_tensor(name: str, content: Any, files: Mapping[str, int]) -> TensorEntry:
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ValueError(f"{name!r:.80} is no tensor's name: 1 to {_LONGEST_NAME} printable characters")
    if content["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {content['dtype']!r}")
    shape = tuple(_natural(size, f"shape of {name}") for size in content["shape"])
    if len(shape) > _MOST_DIMS:
        raise ValueError(f"{name} has {len(shape)} dimensions, more than {_MOST_DIMS}")
    pieces = []
    for item in content["pieces"]:
        piece = Piece(
            tuple(_natural(value, f"offset of {name}") for value in item["offsets"]),
            tuple(_natural(value, f"size of {name}") for value in item["sizes"]),
            str(item["file"]),
            _natural(item["start"], f"start of {name}"),
            tuple(_checksum(value, name) for value in item["xxh3"]),
            tuple((str(file), _natural(start, f"start of {name}")) for file, start in item.get("copies", ())),
        )
        pieces.append(piece)
    entry = TensorEntry(content["dtype"], shape, tuple(pieces))
    for piece in pieces:
        _check_places(name, piece, entry.bytes_of(piece), files)
    _check_cover(name, entry)
    return entry


def _check_places(name: str, piece: Piece, length: int, files: Mapping[str, int]) -> None:
    if len({file for file, _ in piece.places}) < len(piece.places):
        raise ValueError(f"{name} lies twice in {piece.file!r}")
    for file, start in piece.places:
        if file not in files:
            raise ValueError(f"{name} lies in {file!r}, which is none of the data files")
        if start + length > files[file]:
            raise ValueError(f"{name} ends at byte {start + length} of {file}, which has {files[file]}")
    if len(piece.checksums) != -(-length // BLOCK):
        raise ValueError(f"{name} has {len(piece.checksums)} checksums for {length} bytes")


def _check_cover(name: str, entry: TensorEntry) -> None:
    """Pieces cover the tensor without a gap and without an overlap.

    Each box's corners count +1 or -1 by how many of their ends are upper ones: differences of the box's indicator
    function along every dimension. A sum of indicators is that of the whole exactly where its differences are.
    """
    shape, pieces = entry.shape, entry.pieces
    if any(len(piece.offsets) != len(shape) or len(piece.sizes) != len(shape) for piece in pieces):
        raise ValueError(f"{name} has the shape {list(shape)} and a piece with another number of dimensions")
    covered, numel = sum(piece.numel for piece in pieces), math.prod(shape)
    if covered != numel:
        raise ValueError(f"{name}: pieces cover {covered} of {numel} elements")
    if len(pieces) > 1 and any(piece.numel == 0 for piece in pieces):
        raise ValueError(f"{name} has an empty piece")
    whole = Piece((0,) * len(shape), shape, "", 0, ())
    split = [
        dim
        for dim in range(len(shape))
        if any((piece.offsets[dim], piece.sizes[dim]) != (0, shape[dim]) for piece in pieces)
    ]
    if len(split) > _MOST_SPLIT_DIMS:
        raise ValueError(f"{name} is split along {len(split)} dimensions, more than {_MOST_SPLIT_DIMS}")
    count: Counter[tuple[int, ...]] = Counter()
    for piece, times in [*((piece, 1) for piece in pieces), (whole, -1)]:
        for upper in itertools.product((0, 1), repeat=len(split)):
            corner = (piece.offsets[dim] + end * piece.sizes[dim] for dim, end in zip(split, upper, strict=True))
            count[tuple(corner)] += times * (-1) ** sum(upper)
    wrong = [corner for corner, number in count.items() if number]
    if wrong:
        where = dict(zip(split, min(wrong), strict=True))
        place = ", ".join(f"{index} of dimension {dim}" for dim, index in where.items())
        raise ValueError(f"{name} of shape {list(shape)}: pieces overlap or leave a gap at {place}")


def _natural(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{what} is {value!r:.40} and should be a number from 0")
    return value


def _checksum(value: Any, name: str) -> str:
    if not isinstance(value, str) or not _CHECKSUM.fullmatch(value):
        raise ValueError(f"checksum of {name} is {value!r:.40} and should be 16 hexadecimal digits")
    return value
