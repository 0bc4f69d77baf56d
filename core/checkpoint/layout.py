"""Where the checkpoints of a run lie, and which of them is complete.

checkpoints/
    step-00000010/           complete: it got this name after all its bytes were on disk
        manifest.json        names, shapes, checksums, where each piece lies; the run's counters
        rank-00000.safetensors
    .step-00000020.tmp/      incomplete: being written, or left by a job that was killed; never read
    latest                   the name of the newest, moved last; for people and other programs
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gridtron.core.errors import JobError
from gridtron.core.files import Files, write_whole

MANIFEST = "manifest.json"
POINTER = "latest"
_STEP = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.step-\d{8,}\.(tmp|old|gone)")


class CheckpointError(JobError):
    """A checkpoint that cannot be written, found, trusted or used."""


def step_path(root: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` steps."""
    return root / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint folder's name; None for another name."""
    matched = _STEP.fullmatch(path.name)
    return int(matched[1]) if matched else None


def unfinished_path(path: Path) -> Path:
    """Where the checkpoint ``path`` is written before it is complete."""
    return path.with_name(f".{path.name}.tmp")


def named_checkpoints(root: Path) -> list[Path]:
    """What has the name of a complete checkpoint under ``root``, oldest first, whatever became of its files."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if step_of(path) is not None), key=lambda path: step_of(path) or 0)


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under ``root``, oldest first."""
    return [path for path in named_checkpoints(root) if (path / MANIFEST).is_file()]


def deleted_path(path: Path) -> Path:
    """The name of the checkpoint ``path`` while its files are deleted."""
    return path.with_name(f".{path.name}.gone")


def unfinished_checkpoints(root: Path) -> list[Path]:
    """What interrupted saves left under ``root``."""
    return sorted(path for path in root.iterdir() if _LEFT.fullmatch(path.name)) if root.is_dir() else []


def remove_unfinished(root: Path, files: Files) -> None:
    """Deletes what interrupted saves left under ``root``, but for a checkpoint that one was about to replace."""
    for path in unfinished_checkpoints(root):
        replaced = path.with_name(path.name.removeprefix(".").removesuffix(".old"))
        if path.suffix == ".old" and (path / MANIFEST).is_file() and not replaced.exists():
            files.rename(path, replaced)
        else:
            files.remove(path)


def set_aside_newer(root: Path, step: int) -> list[tuple[str, str]]:
    """Takes the names from the checkpoints after ``step``, from which a run went on although it has newer ones.

    Left alone, they would be taken for the newest of a run that has gone another way since.

    Returns:
        Old and new name of each.
    """
    moved = []
    for path in named_checkpoints(root):
        if (step_of(path) or 0) > step:
            number = 1
            while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
                number += 1
            path.rename(aside)
            moved.append((path.name, aside.name))
    return moved


def move_into_place(unfinished: Path, path: Path, files: Files) -> None:
    """Gives a written checkpoint its name, replacing one of the same name, and then moves ``latest``."""
    root = path.parent
    files.sync_folder(unfinished)
    aside = path.with_name(f".{path.name}.old")
    if path.exists():
        files.remove(aside)
        files.rename(path, aside)
    files.rename(unfinished, path)
    files.sync_folder(root)
    write_whole(root / POINTER, f"{path.name}\n".encode(), files)
    files.remove(aside)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading that is a plain file at this very place: no link out of the folder, no pipe.

    Raises:
        CheckpointError: it is missing, unreadable, a link or something else.
    """
    try:
        # Not blocking: opening a named pipe would wait for its writer before anybody could see that it is a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is damaged; use another one") from None
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link: links in a checkpoint are not followed; copy the file") from None
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a plain file; use another checkpoint")
    with os.fdopen(descriptor, "rb") as file:
        yield file
