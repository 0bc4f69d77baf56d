"""Weights of this project's decoder as a Hugging Face folder: safetensors files, config.json, tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gridtron.core.checkpoint.manifest import dtype_code
from gridtron.core.checkpoint.stream import Item, write_items
from gridtron.core.files import Files, folder_aside, write_whole
from gridtron.models.config import GPTConfig
from gridtron.models.huggingface.families import FAMILIES, Family, Layout
from gridtron.models.huggingface.folder import CONFIG, INDEX, SINGLE
from gridtron.models.huggingface.reading import parameter_shapes
from gridtron.models.huggingface.settings import config_to_huggingface

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""Of a file of weights at most, unless one tensor is larger: transformers' own limit."""


@dataclass(frozen=True)
class _Whole:
    """One of their tensors.

    Args:
        name, shape: there.
        parts: of ours that it holds, with the layout and shape of each.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Layout, tuple[int, ...]], ...]

    def read(self, read: Callable[[str], Tensor], dtype: torch.dtype, head: int) -> Tensor:
        """Put together; beside it one tensor of ours is in memory."""
        if len(self.parts) == 1 and self.parts[0][1].parts == 1:
            name, layout, _ = self.parts[0]
            tensor = read(name).to(dtype)
            return tensor.t() if layout.transposed else tensor
        whole = torch.empty(self.shape, dtype=dtype)
        for name, layout, shape in self.parts:
            target = whole.t() if layout.transposed else whole
            ours, place = read(name), 0
            for low, high in layout.outputs(0, shape[0], shape[0], head):
                target[low:high] = ours[place : place + high - low]
                place += high - low
        return whole


def save_huggingface(
    path: str | Path,
    config: GPTConfig,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    family: str | None = None,
    settings: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
    files: Files | None = None,
) -> dict[str, Any]:
    """Writes a folder that transformers' AutoModelForCausalLM loads; it has its name only when all of it is written.

    Args:
        path: the folder; it must not exist.
        config: the shape.
        read: gives a whole weight by its name here (``full_state_dict(model, grid).__getitem__`` of a running model);
            asked once for each, in the order of the files.
        dtype: in which they are written.
        family: model_type; default: the first family of this shape.
        settings: more of config.json, on top of what the shape says.
        tokenizer: names and contents of files that are written beside.
        shard_bytes: a file of weights is ended before it has more than so many.
        files: the disk; default the real one.

    Returns:
        The content of config.json.

    Raises:
        ValueError: a shape that no family, or not this one, has; a dtype of whole numbers; a ``path`` that exists.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: weights are floating-point numbers; nearest: torch.bfloat16")
    path, files = Path(path), files or Files()
    content = config_to_huggingface(config, family)
    content |= {"torch_dtype": str(dtype).removeprefix("torch."), **(settings or {})}
    if path.exists():
        raise ValueError(f"{path} exists; give another folder, or move it away")
    groups = _groups(_wholes(config, FAMILIES[content["model_type"]]), dtype.itemsize, shard_bytes)
    with folder_aside(path, files) as folder:
        _write_weights(folder, groups, read, dtype, config.head_size, files)
        for name, text in (tokenizer or {}).items():
            write_whole(folder / name, text, files)
        write_whole(folder / CONFIG, _json(content), files)
    return content


def _write_weights(
    folder: Path, groups: list[list[_Whole]], read: Callable[[str], Tensor], dtype: torch.dtype, head: int, files: Files
) -> None:
    """A file for each group, and an index over several."""
    placed: dict[str, str] = {}
    for number, group in enumerate(groups):
        file = SINGLE if len(groups) == 1 else f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        items = [_item(whole, read, dtype, head) for whole in group]
        write_items(folder / file, items, files, {"format": "pt"})
        placed |= {whole.name: file for whole in group}
    if len(groups) > 1:
        size = sum(math.prod(whole.shape) for group in groups for whole in group) * dtype.itemsize
        write_whole(folder / INDEX, _json({"metadata": {"total_size": size}, "weight_map": placed}), files)


def _wholes(config: GPTConfig, family: Family) -> list[_Whole]:
    """Their tensors in the order of ours, each with what it holds."""
    parts: dict[str, list[tuple[str, Layout, tuple[int, ...]]]] = {}
    for name, shape in parameter_shapes(config).items():
        found = family.row(name)
        assert found is not None, f"{family.name} has no row for {name}"
        parts.setdefault(found[1], []).append((name, found[0].layout, shape))
    return [_Whole(name, held[0][1].shape(held[0][2]), tuple(held)) for name, held in parts.items()]


def _groups(wholes: Sequence[_Whole], itemsize: int, shard_bytes: int) -> list[list[_Whole]]:
    groups: list[list[_Whole]] = [[]]
    held = 0
    for whole in wholes:
        size = math.prod(whole.shape) * itemsize
        if groups[-1] and held + size > shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(whole)
        held += size
    return groups


def _item(whole: _Whole, read: Callable[[str], Tensor], dtype: torch.dtype, head: int) -> Item:
    return Item(whole.name, dtype_code(dtype), whole.shape, lambda: whole.read(read, dtype, head))


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
