"""``gridtron checkpoint inspect``: what a checkpoint holds, from its manifest alone."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gridtron.conf.refusal import Refusal
from gridtron.core.checkpoint.manifest import DTYPES, TensorEntry
from gridtron.core.options import option
from gridtron.tools.checkpoint.opening import (
    Opened,
    check_report,
    console,
    group_of,
    model_of,
    open_checkpoint,
    printable,
    progress_of,
    write_report,
)

if TYPE_CHECKING:
    from gridtron.core.checkpoint.stored import Stored

_LISTED = 40
"""Tensors that are listed one by one; more are put together by layer."""


@dataclass(frozen=True)
class InspectOptions:
    path: str | None = option(None, "a checkpoint, its run's folder or its checkpoints folder", path=True)
    names: str | None = option(None, "tensors to list one by one, as in parameters/blocks.0.*; null: by layer")
    out: str | None = option(None, "JSON file for the same, every tensor in it", path=True)


def run(options: InspectOptions) -> int:
    """Prints the tables; nothing larger than the manifest is read."""
    opened = open_checkpoint(options.path, tell=False)
    check_report(options.out, opened.stored)
    report = describe(opened, options.names)
    write_report(options.out, report)
    _show(report, one_by_one=options.names is not None or len(report["tensors"]) <= _LISTED)
    return 0


def describe(opened: Opened, names: str | None = None) -> dict[str, Any]:
    """What the manifest tells, as JSON values; sizes in bytes.

    Args:
        opened: the checkpoint.
        names: pattern of the tensors that are listed; None: all.

    Raises:
        Refusal: no tensor has such a name.
    """
    stored = opened.stored
    tensors = stored.manifest.tensors
    listed = {name: entry for name, entry in tensors.items() if names is None or fnmatch.fnmatchcase(name, names)}
    if names is not None and not listed:
        known = ", ".join(list(tensors)[:3])
        raise Refusal([f"names={printable(names)}: none of {len(tensors)} tensors is named so; they are like {known}"])
    return {
        "path": str(stored.path),
        "skipped": [printable(reason) for reason in opened.skipped],
        "progress": progress_of(stored),
        "bytes": sum(stored.manifest.files.values()),
        "groups": _groups(tensors),
        "model": model_of(stored),
        "files": {name: {"bytes": size, "note": _note(stored, name)} for name, size in stored.manifest.files.items()},
        "tensors": {name: _described(entry) for name, entry in listed.items()},
    }


def _described(entry: TensorEntry) -> dict[str, Any]:
    return {
        "dtype": DTYPES[entry.dtype][0],
        "shape": list(entry.shape),
        "bytes": entry.nbytes,
        "pieces": len(entry.pieces),
        "files": sorted({piece.file for piece in entry.pieces}),
        "copies": sum(len(piece.copies) for piece in entry.pieces),
    }


def _groups(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Tensors, elements, bytes and dtypes of each group, in the order of the names."""
    groups: dict[str, dict[str, Any]] = {}
    for name, entry in tensors.items():
        found = groups.setdefault(group_of(name), {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []})
        found["tensors"] += 1
        found["elements"] += entry.nbytes // DTYPES[entry.dtype][1]
        found["bytes"] += entry.nbytes
        if DTYPES[entry.dtype][0] not in found["dtypes"]:
            found["dtypes"].append(DTYPES[entry.dtype][0])
    return groups


def _note(stored: Stored, name: str) -> str:
    """What can be seen of a data file without reading it."""
    try:
        size = os.lstat(stored.path / name).st_size
    except FileNotFoundError:
        return "missing"
    return "" if size == stored.manifest.files[name] else f"has {size:,} bytes: damaged"


def _show(report: Mapping[str, Any], one_by_one: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    screen = console()
    facts = Table(show_header=False, box=None)
    rows = [("checkpoint", printable(report["path"]))]
    rows += [(name, f"{value:,}") for name, value in report["progress"].items()]
    rows += [("bytes", f"{report['bytes']:,}")]
    rows += [(f"model.{printable(key)}", printable(str(value))) for key, value in report["model"].items()]
    rows += [("skipped", reason) for reason in report["skipped"]]
    for key, text in rows:
        facts.add_row(Text(key), Text(text))
    screen.print(facts)

    def table(*columns: str) -> Table:
        made = Table(box=None, pad_edge=False)
        for number, column in enumerate(columns):
            made.add_column(column, justify="left" if number == 0 else "right")
        return made

    groups = table("group", "tensors", "elements", "bytes", "dtype")
    for name, group in report["groups"].items():
        counts = (f"{group[key]:,}" for key in ("tensors", "elements", "bytes"))
        groups.add_row(Text(printable(name)), *counts, ", ".join(group["dtypes"]))
    files = table("file", "bytes", "")
    for name, file in report["files"].items():
        files.add_row(name, f"{file['bytes']:,}", file["note"])
    tensors = table("tensor", "dtype", "shape", "pieces", "files")
    for cells in _tensor_rows(report["tensors"], one_by_one):
        tensors.add_row(*(Text(cell) for cell in cells))
    for shown in (groups, files, tensors):
        screen.print()
        screen.print(shown)


def _tensor_rows(tensors: Mapping[str, Mapping[str, Any]], one_by_one: bool) -> Sequence[tuple[str, ...]]:
    """name, dtype, shape, pieces, files of each tensor; or of all that differ only in a number of their names."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        files = tensor["files"]
        where = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more" if files else "none"
        pieces = str(tensor["pieces"]) + (f" + {tensor['copies']} copies" if tensor["copies"] else "")
        pattern = name if one_by_one else re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        rows[pattern, tensor["dtype"], shape, pieces, where if one_by_one else ""].append(name)
    found = []
    for (pattern, dtype, shape, pieces, where), names in rows.items():
        title = names[0] if len(names) == 1 else f"{pattern} x {len(names)}"
        used = {file for name in names for file in tensors[name]["files"]}
        found.append((title, dtype, shape, pieces, where or str(len(used))))
    return found
