"""Token files: what is written is read, offsets are 64-bit, a damaged index is refused before memory is asked for."""

import struct

import numpy as np
import pytest

from gridtron.core.data.sources import DataError
from gridtron.core.data.token_file import (
    TokenFileWriter,
    open_token_file,
    sequence_pointers,
    smallest_dtype,
    write_index,
)

DOCUMENTS = [[5, 1, 2], [7], [9, 9, 9, 9]]
IDS = [token for document in DOCUMENTS for token in document]


def write(prefix, dtype="u2", documents=DOCUMENTS):
    writer = TokenFileWriter(prefix, np.dtype(dtype))
    for document in documents:
        writer.write(document[:1])
        writer.write(document[1:])
        writer.end_document()
    assert writer.close() == sum(map(len, documents))
    return prefix


@pytest.mark.parametrize("dtype", ["u1", "u2", "i4", "i8"])
def test_round_trip(tmp_path, dtype):
    tokens = open_token_file(write(tmp_path / "t", dtype))
    assert tokens.tokens.dtype == np.dtype(dtype) and tokens.tokens.tolist() == IDS
    assert tokens.document_starts.tolist() == [0, 3, 4]


def test_layout_is_megatrons(tmp_path):
    write(tmp_path / "t")
    content = (tmp_path / "t.idx").read_bytes()
    head = struct.unpack_from("<9sQBQQ", content)
    assert head == (b"MMIDIDX\x00\x00", 1, 8, 3, 4)
    assert struct.unpack_from("<3i", content, 34) == (3, 1, 4)
    assert struct.unpack_from("<3q", content, 46) == (0, 6, 8)
    assert struct.unpack_from("<4q", content, 70) == (0, 1, 2, 3)
    assert len(content) == 102
    assert (tmp_path / "t.bin").read_bytes() == np.array(IDS, "<u2").tobytes()


def test_empty_documents_leave_no_trace(tmp_path):
    tokens = open_token_file(write(tmp_path / "t", documents=[[], [1, 2], [], [3]]))
    assert tokens.document_starts.tolist() == [0, 2] and len(tokens) == 3


@pytest.mark.case(36)
@pytest.mark.parametrize("kind", [np.int32, np.int64, list])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_pointers_are_64_bit(kind, itemsize):
    lengths = [10**9] * 5
    given = lengths if kind is list else np.array(lengths, dtype=kind)
    pointers = sequence_pointers(given, itemsize)
    assert pointers.dtype == np.int64
    assert pointers.tolist() == [index * 10**9 * itemsize for index in range(5)]


@pytest.mark.case(36)
def test_pointers_past_2_gib_in_a_file(tmp_path):
    lengths = np.full(3, 2**31 - 1, dtype=np.int32)
    with open(tmp_path / "big.idx", "wb") as file:
        write_index(file, lengths, [0, 1, 2, 3], np.dtype("u2"))
    with open(tmp_path / "big.bin", "wb") as file:  # a hole: the file takes no room
        file.truncate(2 * int(lengths.astype(np.int64).sum()))
    tokens = open_token_file(tmp_path / "big")
    assert tokens.document_starts.tolist() == [0, 2**31 - 1, 2 * (2**31 - 1)]
    assert int(tokens.tokens[-1]) == 0 and len(tokens) == 3 * (2**31 - 1)


def test_long_documents_become_several_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr("gridtron.core.data.token_file._LONGEST", 3)
    writer = TokenFileWriter(tmp_path / "t", np.dtype("u1"))
    for block in (b"abc", b"de", b"f"):
        writer.write(block)
    writer.end_document()
    writer.write(b"gh")
    writer.close()
    tokens = open_token_file(tmp_path / "t")
    assert bytes(tokens.tokens) == b"abcdefgh" and tokens.document_starts.tolist() == [0, 6]
    assert struct.unpack_from("<3i", (tmp_path / "t.idx").read_bytes(), 34) == (3, 3, 2)


@pytest.mark.parametrize("kept", [0, 5, 20, 33, 34, 50, 101])
def test_truncated_index_is_refused(tmp_path, kept):
    write(tmp_path / "t")
    content = (tmp_path / "t.idx").read_bytes()
    (tmp_path / "t.idx").write_bytes(content[:kept])
    with pytest.raises(DataError, match=r"t\.idx"):
        open_token_file(tmp_path / "t")


@pytest.mark.parametrize("change", [-1, 1, 2])
def test_bin_of_another_size_is_refused(tmp_path, change):
    write(tmp_path / "t")
    content = (tmp_path / "t.bin").read_bytes()
    (tmp_path / "t.bin").write_bytes(content[:change] if change < 0 else content + b"x" * change)
    with pytest.raises(DataError, match=r"16 bytes and the \.bin beside it has"):
        open_token_file(tmp_path / "t")


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (9, "<Q", 2, "version 2"),
        (17, "<B", 6, "dtype code 6"),
        (18, "<Q", 2**60, "truncated"),  # a terabyte of lengths named in a file of 102 bytes
        (18, "<Q", 0, "lists no sequence"),
        (26, "<Q", 2**62, "truncated"),
        (34, "<i", -3, "length -3"),
        (38, "<i", 2, "sequence 2 begins at byte"),
        (54, "<q", 7, "sequence 1 begins at byte 7"),
        (46, "<q", -8, "sequence 0 begins at byte -8"),
        (70, "<q", 1, "documents begin at sequences 1"),
        (94, "<q", 9, "documents begin at sequences 0 to 9 of 3"),
        (78, "<q", 3, "must rise"),
        (0, "<Q", 0, "begins otherwise"),
    ],
)
def test_damaged_index_is_refused(tmp_path, offset, form, value, message):
    write(tmp_path / "t")
    content = bytearray((tmp_path / "t.idx").read_bytes())
    struct.pack_into(form, content, offset, value)
    (tmp_path / "t.idx").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_token_file(tmp_path / "t")


def test_modes_after_the_index_are_passed_over(tmp_path):
    write(tmp_path / "t")
    with open(tmp_path / "t.idx", "ab") as file:
        file.write(b"\0\0\0")
    assert len(open_token_file(tmp_path / "t")) == 8


@pytest.mark.parametrize(("size", "name"), [(256, "u1"), (257, "u2"), (65536, "u2"), (65537, "i4"), (2**31 + 1, "i8")])
def test_smallest_dtype(size, name):
    assert smallest_dtype(size) == np.dtype(name)
