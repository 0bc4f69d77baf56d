"""Checkpoints made by hand: any pieces in any files, with copies, from one process; and edits that keep their seal."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import xxhash
from torch import Tensor

from gridtron.core.checkpoint.layout import MANIFEST
from gridtron.core.checkpoint.load import load
from gridtron.core.checkpoint.manifest import Manifest, Piece, TensorEntry, dtype_code, label_of
from gridtron.core.checkpoint.sealed import seal
from gridtron.core.checkpoint.stream import Item, write_items
from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.files import Files
from gridtron.core.grid import Grid
from gridtron.core.sharding import Sharding
from gridtron.tools.cli import main

Box = tuple[tuple[int, ...], tuple[int, ...]]
Layout = Mapping[str, Sequence[tuple[Box, Sequence[str]]]]
"""Name -> (offsets, sizes) of each piece, and the data files that hold it, the first of them not as a copy."""


class _Hasty(Files):
    """No test of what is read needs it on the disk."""

    def sync(self, file: BinaryIO) -> None:
        file.flush()


def write_by_hand(folder: Path, tensors: Mapping[str, Tensor], layout: Layout, extra: Mapping[str, Any]) -> Path:
    """The checkpoint ``folder``."""
    folder.mkdir(parents=True)
    by_file: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    for name, pieces in layout.items():
        for box, files in pieces:
            for file in files:
                by_file[file].append((name, box))
    places: dict[tuple[str, Box, str], Any] = {}
    sizes = {}
    for file, held in by_file.items():
        held.sort(key=lambda item: (-tensors[item[0]].element_size(), 0 not in item[1][1], item))
        items = [
            Item(label_of(name, box[0]), dtype_code(tensors[name].dtype), box[1], _reader(tensors[name], box))
            for name, box in held
        ]
        written = write_items(folder / file, items, _Hasty())
        for (name, box), place in zip(held, written, strict=True):
            places[name, box, file] = place
            sizes[file] = place.start + place.nbytes
    entries = {}
    for name, boxes in sorted(layout.items()):
        pieces = []
        for box, files in boxes:
            first = places[name, box, files[0]]
            copies = tuple((file, places[name, box, file].start) for file in files[1:])
            pieces.append(Piece(*box, files[0], first.start, first.checksums, copies))
        entries[name] = TensorEntry(dtype_code(tensors[name].dtype), tuple(tensors[name].shape), tuple(pieces))
    (folder / MANIFEST).write_bytes(Manifest(entries, dict(sorted(sizes.items())), extra).to_json())
    return folder


def _reader(tensor: Tensor, box: Box) -> Callable[[], Tensor]:
    return lambda: narrow(tensor, *box)


def narrow(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A box of a tensor."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the JSON of a manifest, and seals it anew as whoever planted it would."""
    content = json.loads((folder / MANIFEST).read_text())
    content.pop("xxh3")
    change(content)
    (folder / MANIFEST).write_bytes(seal(content))


EXTRA = {
    "progress": {"step": 10, "position": 80, "tokens": 1234567},
    "callbacks": {},
    "plan": {"model": {"num_layers": 2, "hidden_size": 6}},
}
RANKS = tuple(f"rank-{number:05d}.safetensors" for number in range(3))


def small_tensors() -> dict[str, Tensor]:
    """Parameters in bf16 with main weights and moments, and a counter."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(2):
        for name, shape in ((f"blocks.{layer}.up.weight", (8, 6)), (f"blocks.{layer}.norm.weight", (6,))):
            main = torch.randn(shape, generator=generator)
            tensors[f"parameters/{name}"] = main.bfloat16()
            tensors[f"optimizer/{name}/main"] = main
            tensors[f"optimizer/{name}/exp_avg"] = torch.randn(shape, generator=generator)
    tensors["precision/loss_scale"] = torch.tensor(1024.0, dtype=torch.float64)
    tensors["empty"] = torch.zeros(0, 4)
    return tensors


def small_layout(copied: bool = True) -> Layout:
    """Matrices cut in two, over ranks 0 and 1, each piece in rank 2's file as well; vectors whole in rank 0's."""
    layout = {}
    for name, tensor in small_tensors().items():
        if tensor.dim() == 2 and tensor.numel():
            half = (tensor.shape[0] // 2, tensor.shape[1])
            boxes = [((0, 0), half), ((half[0], 0), half)]
            pieces = [(box, [file, *RANKS[2:]] if copied else [file]) for box, file in zip(boxes, RANKS, strict=False)]
        else:
            box = ((0,) * tensor.dim(), tuple(tensor.shape))
            pieces = [(box, [RANKS[0], RANKS[2]] if copied else [RANKS[0]])]
        layout[name] = pieces
    return layout


def small_checkpoint(folder: Path, copied: bool = True) -> Path:
    """A checkpoint of three data files, every piece in two of them (or of two data files, without copies)."""
    return write_by_hand(folder, small_tensors(), small_layout(copied), EXTRA)


def load_alone(folder: Path) -> dict[str, torch.Tensor]:
    state = {
        name: ShardedTensorView(torch.zeros_like(tensor), Sharding.whole(tuple(tensor.shape)))
        for name, tensor in small_tensors().items()
    }
    load(folder, state, Grid.layout(1))
    return {name: view.local for name, view in state.items()}


def outside(folder: Path) -> dict[str, bytes | None]:
    """Every plain file around the checkpoint."""
    root = folder.parents[2]
    found = [path for path in root.rglob("*") if folder not in path.parents]
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def commands(folder: Path, sound: Path) -> dict[str, list[str]]:
    path, target = f"path={folder}", folder.parents[2] / "x.safetensors"
    return {
        "inspect": ["inspect", path],
        "verify": ["verify", path],
        "diff": ["diff", path, f"other={sound}"],
        "diff from the other side": ["diff", f"path={sound}", f"other={folder}"],
        "export": ["export", path, f"target={target}", "what=all"],
        "repair": ["verify", path, "repair=true"],
    }


def run_commands(folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[int, str]]:
    """Exit code and message of each command; none of them may print a traceback or write outside."""
    results = {}
    for word, words in commands(folder, sound).items():
        before = outside(folder)
        code = main(["checkpoint", *words])
        printed = capsys.readouterr()
        text = printed.err or printed.out
        assert code in (0, 1, 2) and "Traceback" not in text, (word, text)
        if code == 2 or (word in ("verify", "repair") and code):
            assert len(text.splitlines()) < 12 and len(text) < 5000, (word, text)
            assert all(letter.isprintable() or letter == "\n" for letter in text), (word, text)
        target = str(folder.parents[2] / "x.safetensors")
        after = outside(folder)
        if word == "export" and code == 0:
            after.pop(target)
            os.unlink(target)
        assert after == before, word
        results[word] = (code, text)
    return results


def sealed_text(text: str) -> bytes:
    """A seal over any text that goes on from it."""
    return f'{{\n "xxh3": "{xxhash.xxh3_64_hexdigest(text.encode())}",\n{text}'.encode()
