"""Token files: Megatron's indexed format, ``NAME.bin`` (ids, one after another) and ``NAME.idx`` (where each begins).

The index, little-endian: 9 bytes ``MMIDIDX\\0\\0``, version (uint64, 1), code of the ids' dtype (uint8), number of
sequences n (uint64), number d of document indices (uint64); then n lengths in ids (int32), n offsets in bytes (int64)
and d indices of the sequences at which documents begin (int64), the last of them n.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from gridtron.core.data.sources import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
_BLOCK = 1 << 20
# Lengths are int32 in the format: a longer document becomes several sequences.
_LONGEST = 2**31 - 1


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The narrowest dtype of the format that holds every id below ``vocab_size``."""
    for dtype in (np.uint8, np.uint16, np.int32):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    return np.dtype(np.int64)


def sequence_pointers(lengths: Sequence[int] | NDArray[np.integer], itemsize: int) -> NDArray[np.int64]:
    """Byte offset of each sequence from the lengths in ids: int64 whatever the type of the lengths.

    NumPy adds int32 up in int32 on some systems, and offsets then turn negative past 2 GiB.
    """
    pointers = np.zeros(len(lengths), dtype=np.int64)
    if len(lengths) > 1:
        np.cumsum(np.asarray(lengths[:-1], dtype=np.int64), out=pointers[1:])
    pointers *= itemsize
    return pointers


class TokenFileWriter:
    """Writes ``PREFIX.bin`` sequence by sequence and ``PREFIX.idx`` at :meth:`close`; both are on disk when it returns.

    Args:
        prefix: path without the endings.
        dtype: of the ids in the file.
    """

    def __init__(self, prefix: Path, dtype: np.dtype):
        self._prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._file: BinaryIO = open(f"{prefix}.bin", "wb")  # noqa: SIM115
        self._lengths: list[int] = []
        self._documents: list[int] = [0]
        self._open = 0

    def write(self, ids: Sequence[int] | NDArray[np.integer] | bytes) -> None:
        """Adds ids to the sequence that is being written."""
        if isinstance(ids, bytes) and self._dtype.itemsize == 1:
            self._file.write(ids)
        else:
            array = np.frombuffer(ids, dtype=np.uint8) if isinstance(ids, bytes) else np.asarray(ids)
            self._file.write(array.astype(self._dtype).tobytes())
        if self._open + len(ids) > _LONGEST:
            self._end_sequence()
        self._open += len(ids)

    def end_document(self) -> None:
        """Ends the document; one without ids leaves no trace."""
        self._end_sequence()
        if self._documents[-1] != len(self._lengths):
            self._documents.append(len(self._lengths))

    def _end_sequence(self) -> None:
        if self._open:
            self._lengths.append(self._open)
            self._open = 0

    def close(self) -> int:
        """Writes the index, flushes both files to the disk. Returns the number of ids."""
        self.end_document()
        _flush(self._file)
        with open(f"{self._prefix}.idx", "wb") as file:
            write_index(file, self._lengths, self._documents, self._dtype)
            _flush(file)
        return sum(self._lengths)

    def abandon(self) -> None:
        """Closes the file, as far as a full disk lets it; what was written is the caller's to remove."""
        try:
            self._file.close()
        except OSError:
            return


def write_index(file: BinaryIO, lengths: Sequence[int], documents: Sequence[int], dtype: np.dtype) -> None:
    """The index of sequences of these lengths; ``documents``: where each begins, and then the number of sequences."""
    codes = {np.dtype(kind): code for code, kind in _DTYPES.items()}
    code = codes[np.dtype(dtype).newbyteorder("=")]
    file.write(_HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
    file.write(np.asarray(lengths, dtype="<i4").tobytes())
    file.write(sequence_pointers(lengths, np.dtype(dtype).itemsize).astype("<i8").tobytes())
    file.write(np.asarray(documents, dtype="<i8").tobytes())


def _flush(file: BinaryIO) -> None:
    with file:
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class TokenFile:
    """A pair of token files, memory-mapped.

    Args:
        tokens: every id of the file, in order; (count,), in the file's dtype.
        document_starts: index of the first id of each document; (documents,), int64, rising, the first 0.
    """

    tokens: NDArray[np.integer]
    document_starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)


def open_token_file(prefix: Path) -> TokenFile:
    """Maps ``PREFIX.bin`` by ``PREFIX.idx``; no memory is taken before every size was held against the files.

    Raises:
        DataError: not this format, truncated, or an index that disagrees with the .bin.
    """
    binary, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    dtype, sequences, documents = _read_header(index)
    size = binary.stat().st_size
    # Maps, not reads: the sizes were checked, and an index of many gigabytes stays on disk.
    lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,))
    pointers = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,))
    starts = np.memmap(index, "<i8", "r", _HEADER.size + 12 * sequences, (documents,))
    _check_sequences(index, lengths, pointers, dtype.itemsize, size)
    _check_documents(index, starts, sequences)
    tokens = np.memmap(binary, dtype.newbyteorder("<"), "r", 0, (size // dtype.itemsize,))
    begins = starts[starts < sequences] if documents else np.zeros(1, np.int64)
    first_ids = np.asarray(pointers[np.asarray(begins, np.int64)], dtype=np.int64) // dtype.itemsize
    return TokenFile(tokens, np.unique(first_ids))


def _read_header(index: Path) -> tuple[np.dtype, int, int]:
    size = index.stat().st_size
    with open(index, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
        reason = (
            f"{size} bytes, and the header alone has {_HEADER.size}" if size < _HEADER.size else "it begins otherwise"
        )
        raise DataError(
            f"{index}: not an index of tokens in Megatron's format ({reason}); prepare it again from its text"
        )
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{index}: version {version} of the format; version {VERSION} is read")
    if code not in _DTYPES:
        known = ", ".join(f"{key} ({kind.__name__})" for key, kind in _DTYPES.items())
        raise DataError(f"{index}: dtype code {code} is not one of whole numbers; known: {known}")
    if not sequences:
        raise DataError(f"{index}: it lists no sequence; give another file")
    needed = _HEADER.size + 12 * sequences + 8 * documents
    # Files with several modes carry one more byte a sequence, which nothing here needs.
    if size not in (needed, needed + sequences):
        state = "truncated" if size < needed else "longer than it says"
        raise DataError(
            f"{index}: {state}: it lists {sequences:,} sequences and {documents:,} documents, which is "
            f"{needed:,} bytes, and has {size:,}; copy or prepare it again"
        )
    return np.dtype(_DTYPES[code]), sequences, documents


def _check_sequences(index: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, size: int) -> None:
    """Every sequence must begin where the one before it ends, and the last must end with the file."""
    expected = 0
    for start in range(0, len(lengths), _BLOCK):
        block = np.asarray(lengths[start : start + _BLOCK], dtype=np.int64)
        if block.min() < 0:
            raise DataError(
                f"{index}: sequence {start + int(block.argmin())} has length {block.min()}; prepare it again"
            )
        begins = expected + sequence_pointers(block, itemsize)
        wrong = np.flatnonzero(begins != pointers[start : start + _BLOCK])
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"{index}: sequence {start + at} begins at byte {int(pointers[start + at]):,} and the ones before it "
                f"end at {int(begins[at]):,}; prepare it again"
            )
        expected = int(begins[-1]) + int(block[-1]) * itemsize
    if expected != size:
        raise DataError(
            f"{index}: its sequences are {expected:,} bytes and the .bin beside it has {size:,}; "
            "they are not of one pair, or one is truncated: copy or prepare both again"
        )


def _check_documents(index: Path, starts: np.ndarray, sequences: int) -> None:
    if not len(starts):
        return
    first, last = int(starts[0]), int(starts[-1])
    rising = all(bool(np.all(np.diff(starts[at : at + _BLOCK + 1]) >= 0)) for at in range(0, len(starts), _BLOCK))
    if first != 0 or last > sequences or not rising:
        raise DataError(
            f"{index}: documents begin at sequences {first} to {last} of {sequences}, "
            "and must rise from 0 to that number; prepare it again"
        )
