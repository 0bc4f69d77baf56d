"""Writes a safetensors file tensor by tensor: one in memory at a time, checksums taken as the bytes go out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from gridtron.core.checkpoint.manifest import BLOCK, header_bytes
from gridtron.core.files import Files

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Item:
    """One tensor of a file.

    Args:
        label: its name in the file.
        code: safetensors' code of its dtype.
        shape: its sizes in the file.
        read: gives it when its turn has come.
    """

    label: str
    code: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Written:
    """Where an item came to lie: first byte in the file, number of bytes, checksum of each block."""

    start: int
    nbytes: int
    checksums: tuple[str, ...]


def write_items(
    path: Path, items: Sequence[Item], files: Files, metadata: Mapping[str, str] | None = None
) -> list[Written]:
    """Writes the new file ``path`` and returns when it is on the disk.

    Args:
        path: of the file; it must not exist.
        items: in the order in which they lie in it.
        files: the disk.
        metadata: of the header.
    """
    header = header_bytes([(item.label, item.code, item.shape) for item in items], metadata)
    position, written = len(header), []
    with files.create(path) as file:
        files.write(file, header)
        for item in items:
            tensor = item.read()
            assert tuple(tensor.shape) == item.shape, (item.label, tensor.shape, item.shape)
            content = tensor_bytes(tensor)
            checksums = []
            for start in range(0, content.nbytes, BLOCK):
                # Block by block: what the checksum has brought into the cache is written from there.
                with content[start : start + BLOCK] as block:
                    checksums.append(checksum(block))
                    files.write(file, block)
            written.append(Written(position, content.nbytes, tuple(checksums)))
            position += content.nbytes
            # Before the next one is asked for.
            del tensor, content
        files.sync(file)
    return written


def checksum(block: memoryview) -> str:
    """XXH3 of 64 bits, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(block)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order, as bytes; copied only from a device or from strided memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
