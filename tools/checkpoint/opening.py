"""What the words of ``gridtron checkpoint`` share: which checkpoint a path means, and how results are told."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.conf.refusal import Refusal
from gridtron.core.checkpoint.find import look_for
from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.checkpoint.stored import Stored
from gridtron.core.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was found.

    Args:
        stored: it.
        skipped: newer ones beside it that cannot be used, with the reason.
    """

    stored: Stored
    skipped: tuple[str, ...] = ()


def open_checkpoint(path: str | None, key: str = "path", damaged: bool = False, tell: bool = True) -> Opened:
    """The checkpoint ``path``, or the newest of a run's folder or of its ``checkpoints`` folder.

    Args:
        path: as typed.
        key: of the option that holds it, for messages.
        damaged: the newest by its name, whatever its data files are like.
        tell: say which newer ones were skipped, on standard error.

    Raises:
        Refusal: there is none.
        CheckpointError: its manifest is damaged.
    """
    if path is None:
        raise Refusal([f"{key}=PATH is missing: the folder of a checkpoint (step-00000010), or of its run"])
    try:
        found = look_for(Path(path).absolute(), damaged)
    except CheckpointError as error:
        raise Refusal([f"{key}={printable(path)}: {error}"]) from None
    assert found.path is not None
    if tell:
        for reason in found.skipped:
            print(f"skipped {printable(reason)}", file=sys.stderr)
    return Opened(Stored(found.path), found.skipped)


def check_report(out: str | None, stored: Stored) -> None:
    """Refuses a report that would lie among the checkpoint's files, or where nothing can be written.

    Raises:
        Refusal: naming it.
    """
    if out is None:
        return
    folder = Path(out).absolute().parent
    if not folder.is_dir():
        raise Refusal([f"out={printable(out)}: there is no folder {printable(str(folder))}; make it, or give another"])
    if Path(out).is_dir():
        raise Refusal([f"out={printable(out)}: it is a folder; give a file, as in {printable(out)}/report.json"])
    if folder.resolve() == stored.path.resolve():
        raise Refusal([f"out={printable(out)}: it would lie among the checkpoint's files; give another folder"])


def write_report(out: str | None, content: Mapping[str, Any]) -> None:
    """Writes ``content`` as JSON, where a file was asked for."""
    if out is None:
        return
    text = json.dumps(content, indent=1) + "\n"
    path = Path(out)
    if path.exists() and not path.is_file():
        # A device or a pipe is written to; a file put in its place would end it.
        path.write_text(text, encoding="utf-8")
    else:
        write_whole(path.absolute(), text.encode())


def progress_of(stored: Stored) -> dict[str, int]:
    """The run's counters (step, position, tokens) that the checkpoint tells, where they are numbers."""
    told = stored.manifest.extra.get("progress")
    if not isinstance(told, Mapping):
        return {}
    return {name: told[name] for name in ("step", "position", "tokens") if type(told.get(name)) is int}


def model_of(stored: Stored) -> dict[str, Any]:
    """The model's options, where the checkpoint tells its run's plan."""
    plan = stored.manifest.extra.get("plan")
    model = plan.get("model") if isinstance(plan, Mapping) else None
    return dict(model) if isinstance(model, Mapping) else {}


_STATES = "optimizer states"


def group_of(name: str) -> str:
    """What kind of tensor a name is of: parameters, main weights, optimizer states, precision, or its first part."""
    first, _, rest = name.partition("/")
    if first == "optimizer":
        return "main weights" if rest.endswith("/main") else _STATES
    return first


def kind_of(name: str) -> str:
    """As :func:`group_of`, with the states of an optimizer apart: exp_avg is not measured against exp_avg_sq."""
    group = group_of(name)
    return f"{group} {name.rpartition('/')[2]}" if group == _STATES else group


def printable(text: str, most: int = 200) -> str:
    """``text`` without what would steer a terminal, and no longer than ``most`` characters."""
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in cut)


def console() -> Console:
    """Standard output; a pipe has no width of its own, so nothing is cut there."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(file=sys.stdout, width=None if terminal else 1000, highlight=False, markup=False, emoji=False)


def first_lines(error: CheckpointError | Refusal, most: int = 10) -> Refusal:
    """An error as a refusal of a few lines."""
    lines = str(error).splitlines()
    if len(lines) > most:
        lines = [*lines[: most - 1], f"and {len(lines) - most + 1} lines more"]
    return Refusal(["\n".join(printable(line, 1000) for line in lines)])
