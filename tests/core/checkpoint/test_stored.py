"""Stored gives back what was written, whatever the pieces; files are streamed, and whole or not there."""

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_files import EXTRA, narrow, small_checkpoint, small_tensors, write_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gridtron.core.checkpoint import manifest, stored, stream
from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.checkpoint.manifest import Manifest, header_bytes
from gridtron.core.checkpoint.stored import Stored
from gridtron.core.checkpoint.stream import Item, checksum, write_items
from gridtron.core.checkpoint.whole import write_checkpoint
from gridtron.core.files import Files
from gridtron.core.pieces import rectangles


def cuts(draw: Any, size: int) -> list[tuple[int, int]]:
    """A dimension cut at some places: (offset, size) of each part."""
    edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    return [(low, high - low) for low, high in itertools.pairwise(edges)] or [(0, 0)]


@st.composite
def tensors_with_pieces(draw: Any) -> tuple[Tensor, list[Any]]:
    """A tensor and a partition of it: rows and columns cut, or a flat range each as data ranks cut it."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.bool]))
    count = int(torch.Size(shape).numel())
    tensor = (torch.arange(count) * 7 % 251).to(dtype).view(shape)
    if count and draw(st.booleans()):
        boxes = []
        for low, size in cuts(draw, count):
            boxes += [(offsets, sizes) for offsets, sizes, _ in rectangles(shape, low, low + size)]
    else:
        boxes = [((), ())]
        for size in shape:
            parts = cuts(draw, size) if count else [(0, size)]
            boxes = [((*o, low), (*s, length)) for o, s in boxes for low, length in parts]
    files = ["rank-00000.safetensors", "rank-00001.safetensors"]
    return tensor, [(box, [files[draw(st.integers(0, 1))]]) for box in boxes]


@given(tensors_with_pieces(), st.data())
@settings(max_examples=120, deadline=None)
def test_any_pieces_and_any_boxes_of_them(tmp_path_factory: Any, made: Any, data: Any) -> None:
    """With blocks of 32 bytes, so that pieces have several, and boxes begin and end inside of them."""
    tensor, layout = made
    with pytest.MonkeyPatch.context() as patch:
        for module in (manifest, stored, stream):
            patch.setattr(module, "BLOCK", 32)
        folder = tmp_path_factory.mktemp("any") / "step-00000001"
        found = Stored(write_by_hand(folder, {"x": tensor}, {"x": layout}, {}))
        assert torch.equal(found.tensor("x"), tensor) and found.tensor("x").dtype == tensor.dtype
        (piece, *_) = found.manifest.tensors["x"].pieces
        offsets = tuple(data.draw(st.integers(0, max(size - 1, 0))) for size in piece.sizes)
        sizes = tuple(data.draw(st.integers(0, size - o)) for size, o in zip(piece.sizes, offsets, strict=True))
        expected = narrow(narrow(tensor, piece.offsets, piece.sizes), offsets, sizes)
        contiguous = torch.zeros(sizes, dtype=tensor.dtype)
        strided = torch.zeros(tuple(2 * size for size in sizes), dtype=tensor.dtype)[tuple(slice(0, s) for s in sizes)]
        wider = torch.zeros(sizes, dtype=torch.float64)
        with found.open(piece.file) as file:
            for target in (contiguous, strided, wider):
                found.copy_box(file, "x", piece, offsets, target)
                assert torch.equal(target, expected.to(target.dtype))


def test_only_blocks_that_are_touched_are_checked(tmp_path: Path) -> None:
    """Two real blocks and a bit: damage in the last one is not met by who reads the first."""
    tensor = torch.arange(2 * (1 << 22) + 100, dtype=torch.int32)
    folder = write_by_hand(
        tmp_path / "step-00000001",
        {"x": tensor},
        {"x": [(((0,), tuple(tensor.shape)), ["rank-00000.safetensors"])]},
        {},
    )
    path = folder / "rank-00000.safetensors"
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0")
    found = Stored(folder)
    (piece,) = found.manifest.tensors["x"].pieces
    assert len(piece.checksums) == 3
    first = torch.empty(1000, dtype=torch.int32)
    with found.open(piece.file) as opened:
        found.copy_box(opened, "x", piece, (5,), first)
    assert torch.equal(first, tensor[5:1005])
    with pytest.raises(CheckpointError, match="checksum differs"):
        found.tensor("x")


def test_memory_is_asked_for_after_the_files_were_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Stored(small_checkpoint(tmp_path / "step-00000010"))
    (found.path / "rank-00001.safetensors").unlink()
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is missing"):
        found.tensor("parameters/blocks.0.up.weight")


# ---------------------------------------------------------------- writing from one process
def described(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_whole_tensors_in_files_of_limited_size(tmp_path: Path) -> None:
    tensors = small_tensors()
    path = tmp_path / "checkpoints" / "step-00000010"
    write_checkpoint(path, described(tensors), tensors.__getitem__, EXTRA, file_bytes=300)
    found = Stored(path)
    assert len(found.manifest.files) > 2 and found.manifest.extra == EXTRA
    assert all(size < 300 + 8 * 6 * 4 + 2000 for size in found.manifest.files.values())
    assert found.names() == sorted(tensors)
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in tensors.items())
    for name, entry in found.manifest.tensors.items():
        assert all(piece.start % tensors[name].element_size() == 0 for piece in entry.pieces)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["latest", "step-00000010"]
    with pytest.raises(CheckpointError, match="exists"):
        write_checkpoint(path, described(tensors), tensors.__getitem__, EXTRA)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError, ValueError])
def test_what_was_begun_goes_when_reading_fails(fault: type[BaseException], tmp_path: Path) -> None:
    tensors = small_tensors()

    def read(name: str) -> Tensor:
        if name.endswith("1.up.weight"):
            raise fault
        return tensors[name]

    with pytest.raises(fault):
        write_checkpoint(tmp_path / "step-00000010", described(tensors), read, EXTRA)
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def read(name: str) -> Tensor:
        gc.collect()
        assert sum(found() is not None for found in alive) <= 1, "the one before may still be in hand, no other"
        tensor = torch.full((100, 100), float(len(alive)))
        alive.append(weakref.ref(tensor))
        return tensor

    names = [f"x{number}" for number in range(6)]
    write_checkpoint(tmp_path / "step-00000010", dict.fromkeys(names, (torch.float32, (100, 100))), read, {})
    assert float(Stored(tmp_path / "step-00000010").tensor("x4")[0, 0]) == 4.0


def test_streamed_files_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5, dtype=torch.float64), "b": torch.randn(7).bfloat16(), "c": torch.zeros(0, 2)}
    codes = {"a": "F64", "b": "BF16", "c": "F32"}
    items = [
        Item(name, codes[name], tuple(tensor.shape), lambda tensor=tensor: tensor) for name, tensor in tensors.items()
    ]
    written = write_items(tmp_path / "x.safetensors", items, Files(), {"step": "3"})
    assert written[0].start == len(header_bytes([(i.label, i.code, i.shape) for i in items], {"step": "3"}))
    assert written[0].checksums == (checksum(stream.tensor_bytes(tensors["a"])),) and written[2].checksums == ()
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"step": "3"}
    with pytest.raises(FileExistsError):
        write_items(tmp_path / "x.safetensors", items, Files())


def test_a_manifest_reads_as_it_was_written(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "step-00000010")
    found = Manifest.read(folder)
    assert (folder / "manifest.json").read_bytes() == found.to_json()
    assert all(len(piece.copies) == 1 for entry in found.tensors.values() for piece in entry.pieces)


@pytest.mark.parametrize("kept", ["all", "empty"])
def test_empty_tensors_of_every_width(kept: str, tmp_path: Path) -> None:
    """They begin where the next one does: one order decides when they are written and when they are read."""
    tensors = {
        "b": torch.zeros(0, 3),
        "a.x": torch.zeros(0),
        "a": torch.zeros(0, dtype=torch.float64),
        "d": torch.zeros(0, dtype=torch.bfloat16),
        "a.b": torch.zeros(2, 0),
    } | ({"c": torch.ones(3)} if kept == "all" else {})
    path = tmp_path / "step-00000001"
    write_checkpoint(path, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, tensors.__getitem__, {})
    stored = Stored(path)
    stored.check_files()
    assert all(torch.equal(stored.tensor(name), tensor) for name, tensor in tensors.items())
