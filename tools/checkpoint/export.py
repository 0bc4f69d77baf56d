"""``gridtron checkpoint export``: one safetensors file under grid-independent names, streamed tensor by tensor."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gridtron.conf.refusal import Refusal
from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.checkpoint.manifest import DTYPES, dtype_code, file_order, header_bytes
from gridtron.core.checkpoint.stream import Item, write_items
from gridtron.core.files import Files
from gridtron.core.options import option
from gridtron.core.precision import FORMATS, dtype_named
from gridtron.tools.checkpoint.opening import console, model_of, open_checkpoint, printable, progress_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gridtron.core.checkpoint.stored import Stored

_PARAMETERS = "parameters/"
_CHUNK = 1 << 16
"""Elements that are looked at at once."""
_LARGEST_HEADER = 100_000_000
"""Bytes: readers of safetensors refuse a larger header."""


@dataclass(frozen=True)
class ExportOptions:
    path: str | None = option(None, "a checkpoint, its run's folder or its checkpoints folder", path=True)
    target: str | None = option(None, "the file to write, FILE.safetensors; it must not exist", path=True)
    what: str = option("parameters", "parameters (by their names alone), or all", choices=("parameters", "all"))
    weights: str = option(
        "saved",
        "of parameters: as they were saved, or main: the optimizer's wide weights where it has some",
        choices=("saved", "main"),
    )
    dtype: str | None = option(None, "of floating-point tensors; null: as they are", choices=(None, *FORMATS))


def run(options: ExportOptions) -> int:
    """Writes the file; 0, or an error and nothing written."""
    if options.target is None:
        raise Refusal(["target=FILE.safetensors is missing: the file to write"])
    stored = open_checkpoint(options.path).stored
    target = _checked(options.target, stored)
    if options.what == "all" and options.weights == "main":
        raise Refusal(["weights=main: with what=all the main weights are in the file anyway; leave it out"])
    size = export(stored, target, options.what, options.weights, options.dtype)
    text = f"wrote {printable(str(target))} ({size:,} bytes)"
    console().print(text, soft_wrap=True)
    return 0


def _checked(target: str, stored: Stored) -> Path:
    """The path of a file that can be written.

    Raises:
        Refusal: naming what is wrong with it.
    """
    path, shown = Path(target).absolute(), printable(target)
    if path.suffix != ".safetensors":
        raise Refusal([f"target={shown}: the file's name ends in .safetensors; nearest: {shown}.safetensors"])
    if os.path.lexists(path):
        raise Refusal([f"target={shown}: it exists; give another name, or move it away"])
    if not path.parent.is_dir():
        raise Refusal([f"target={shown}: there is no folder {printable(str(path.parent))}; make it, or give another"])
    if path.parent.resolve() == stored.path.resolve():
        raise Refusal([f"target={shown}: it would lie among the checkpoint's files; give another folder"])
    return path


def export(
    stored: Stored,
    target: Path,
    what: str = "parameters",
    weights: str = "saved",
    dtype: str | None = None,
    files: Files | None = None,
) -> int:
    """Writes the new file ``target`` and returns its size in bytes; one tensor, and its copy in ``dtype``, in memory.

    Args:
        stored: the checkpoint.
        target: of the file, written under another name until it is complete.
        what: "parameters", without that prefix; or "all".
        weights: "main": in place of a parameter its main weights, where there are any.
        dtype: fp32, bf16, fp16 or fp64 for floating-point tensors; None: as they are.
        files: the disk; default the real one.

    Raises:
        CheckpointError: a damaged file; a value that ``dtype`` cannot hold; a file that no reader would take.
        Refusal: there is nothing to write.
    """
    files = files or Files()
    items = [_item(stored, name, source, dtype) for name, source in _sources(stored, what, weights).items()]
    items.sort(key=lambda item: file_order(DTYPES[item.code][1], item.shape, item.label))
    metadata = _metadata(stored)
    header = header_bytes([(item.label, item.code, item.shape) for item in items], metadata)
    if len(header) > _LARGEST_HEADER:
        raise CheckpointError(
            f"{stored.path}: names and settings take {len(header)} bytes, and safetensors files hold "
            f"{_LARGEST_HEADER}; use what=parameters"
        )
    aside = target.with_name(f".{target.name}.tmp")
    files.remove(aside)
    try:
        written = write_items(aside, items, files, metadata)
        if os.path.lexists(target):
            raise Refusal([f"target={target}: somebody made it meanwhile; give another name"])
        files.rename(aside, target)
    except BaseException:
        files.remove(aside)
        raise
    files.sync_folder(target.parent)
    return len(header) + sum(place.nbytes for place in written)


def _sources(stored: Stored, what: str, weights: str) -> dict[str, str]:
    """Name in the file -> name in the checkpoint."""
    names = stored.manifest.tensors
    if what == "all":
        chosen = {name: name for name in names}
    else:
        chosen = {name.removeprefix(_PARAMETERS): name for name in names if name.startswith(_PARAMETERS)}
        if weights == "main":
            main = {name: f"optimizer/{name}/main" for name in chosen}
            chosen |= {name: source for name, source in main.items() if source in names}
    if not chosen:
        raise Refusal([f"{stored.path}: it holds no {'tensor' if what == 'all' else 'parameter'}; nothing to write"])
    if "__metadata__" in chosen or "" in chosen:
        raise CheckpointError(f"{stored.path}: a tensor without a name, or with one that safetensors keeps for itself")
    return chosen


def _item(stored: Stored, name: str, source: str, dtype: str | None) -> Item:
    kept = stored.dtype(source)
    wanted = dtype_named(dtype) if dtype and kept.is_floating_point else kept

    def read() -> Tensor:
        tensor = stored.tensor(source)
        return tensor if wanted == kept else _cast(tensor, wanted, f"{stored.path}: {source}")

    shape = stored.manifest.tensors[source].shape
    return Item(name, dtype_code(wanted), shape, read)


def _cast(tensor: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """``tensor`` in another floating-point dtype.

    Raises:
        CheckpointError: finite numbers in it would become infinite.
    """
    cast = tensor.new_empty(tensor.shape, dtype=dtype)
    source, target = tensor.reshape(-1), cast.view(-1)
    for start in range(0, source.numel(), _CHUNK):
        values = source[start : start + _CHUNK]
        chosen = target[start : start + _CHUNK].copy_(values)
        if bool((chosen.isinf() & ~values.isinf()).any()):
            name = str(dtype).removeprefix("torch.")
            raise CheckpointError(f"{what} has values that {name} cannot hold; use dtype=bf16")
    return cast


def _metadata(stored: Stored) -> dict[str, str]:
    """Of the file's header, all text: the run's counters and the model's options, as JSON."""
    told = {name: str(value) for name, value in progress_of(stored).items()}
    model = model_of(stored)
    # "pt": how libraries that read such files know whose tensors they are.
    return {"format": "pt", **told} | ({"model": json.dumps(model)} if model else {})
