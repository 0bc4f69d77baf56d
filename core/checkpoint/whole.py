"""Writes a checkpoint from one process, tensor by tensor, of a model that need not fit into its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.checkpoint.layout import (
    MANIFEST,
    CheckpointError,
    move_into_place,
    remove_unfinished,
    unfinished_path,
)
from gridtron.core.checkpoint.manifest import (
    DTYPES,
    Manifest,
    Piece,
    TensorEntry,
    data_file,
    dtype_code,
    file_order,
    label_of,
)
from gridtron.core.checkpoint.stream import Item, write_items
from gridtron.core.files import Files, write_whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FILE_BYTES = 4 << 30


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    extra: Mapping[str, Any],
    files: Files | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """The checkpoint ``path`` of whole tensors; it has its name only when all of it is on the disk.

    Args:
        path: folder of the checkpoint, named as :func:`gridtron.core.checkpoint.layout.step_path` does.
        tensors: dtype and shape by name.
        read: gives a tensor when its turn has come; asked once for each, so that one is in memory at a time.
        extra: JSON values.
        files: the disk; default the real one.
        file_bytes: a data file is ended when it has so many; a tensor lies in one file.

    Raises:
        CheckpointError: ``path`` exists.
    """
    files = files or Files()
    if path.exists():
        raise CheckpointError(f"{path} exists; give another folder, or move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(path.parent, files)
    folder = unfinished_path(path)
    files.make_folder(folder)
    try:
        entries: dict[str, TensorEntry] = {}
        sizes: dict[str, int] = {}
        for number, names in enumerate(_groups(tensors, file_bytes)):
            file = data_file(number)
            items = []
            for name in names:
                dtype, shape = tensors[name]
                items.append(Item(label_of(name, (0,) * len(shape)), dtype_code(dtype), shape, partial(read, name)))
            written = write_items(folder / file, items, files)
            for name, item, place in zip(names, items, written, strict=True):
                piece = Piece((0,) * len(item.shape), item.shape, file, place.start, place.checksums)
                entries[name] = TensorEntry(item.code, item.shape, (piece,))
                sizes[file] = place.start + place.nbytes
        write_whole(folder / MANIFEST, Manifest(dict(sorted(entries.items())), sizes, extra).to_json(), files)
        move_into_place(folder, path, files)
    except BaseException:
        files.remove(folder)
        raise


def _groups(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], file_bytes: int) -> list[list[str]]:
    """Names of each data file, in its order."""
    groups: list[list[str]] = [[]]
    held = 0
    for name in sorted(tensors, key=lambda name: file_order(tensors[name][0].itemsize, tensors[name][1], name)):
        dtype, shape = tensors[name]
        if held >= file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += math.prod(shape) * DTYPES[dtype_code(dtype)][1]
    return groups if groups[0] else []
