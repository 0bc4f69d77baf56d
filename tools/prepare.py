"""``gridtron prepare``: text and jsonl to token files, ahead of a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gridtron.conf.refusal import Refusal
from gridtron.tools.arguments import parse_arguments, print_refusal


def main(arguments: Sequence[str]) -> int:
    """Prepares what ``data.*`` names; prints a table, and writes the same to ``out=FILE.json``."""
    out = next((word.partition("=")[2] for word in arguments if word.startswith("out=")), None)
    try:
        summary = _prepare([word for word in arguments if not word.startswith("out=")])
        if out is not None:
            _write_json(Path(out).expanduser(), summary)
    except Refusal as refusal:
        return print_refusal(refusal)
    _print_table(summary)
    return 0


def _prepare(arguments: list[str]) -> dict[str, Any]:
    from gridtron.conf.compose import compose
    from gridtron.conf.rules import Surroundings
    from gridtron.core.data.prepare import default_cache_folder, prepare_data
    from gridtron.core.data.sources import DataError

    parsed = parse_arguments(arguments)
    foreign = [word for word in parsed.overrides if not word.lstrip("+").startswith(("data.", "data=", "experiment="))]
    if parsed.sweep or foreign:
        named = foreign[0] if foreign else "-m"
        raise Refusal([f"{named}: prepare takes data.path, data.tokenizer, data.directory and out=FILE.json only"])
    plan = compose(parsed.overrides, parsed.directories, surroundings=Surroundings.here(os.environ))
    try:
        return prepare_data(plan.data, default_cache_folder(os.environ)).report()
    except DataError as fault:
        raise Refusal([str(fault)]) from None


def _write_json(file: Path, summary: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    except OSError as fault:
        raise Refusal([f"out={file}: {fault.strerror}; give another file"]) from None


def _print_table(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in summary.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    # A pipe has no width of its own: nothing is cut there.
    console = Console(file=sys.stdout) if sys.stdout.isatty() else Console(file=sys.stdout, width=1000)
    console.print(table)
