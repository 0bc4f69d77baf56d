"""Where the checkpoints of a run lie, and which of them is complete.

checkpoints/
    step-00000010/           complete: it got this name after all its bytes were on disk
        manifest.json        names, shapes, where each piece lies; the run's counters
        rank-00000.safetensors
    .step-00000020.tmp/      incomplete: being written, or left by a job that was killed; never read
    latest                   the name of the newest, moved last
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gridtron.core.errors import JobError

MANIFEST = "manifest.json"
POINTER = "latest"
_STEP = re.compile(r"step-(\d{8,})")


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


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under ``root``, oldest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if step_of(path) is not None and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint that ``latest`` names; the newest complete one without that file; None if there is none.

    Raises:
        CheckpointError: ``latest`` holds something else than the name of a checkpoint.
    """
    complete = complete_checkpoints(root)
    pointer = root / POINTER
    if not os.path.lexists(pointer):
        return complete[-1] if complete else None
    with open_regular(pointer) as file:
        name = file.read(64).decode("ascii", "replace").strip()
    if not _STEP.fullmatch(name):
        raise CheckpointError(
            f"{pointer} should hold the name of a checkpoint, as step-00000010, and holds {name[:40]!r}; "
            f"write {complete[-1].name if complete else 'one'} into it, or delete it"
        )
    named = root / name
    return named if named in complete else (complete[-1] if complete else None)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint meant by ``path``: itself, or the newest of a run's folder or of its ``checkpoints`` folder.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    for root in (path, path / "checkpoints"):
        if found := latest_checkpoint(root):
            return found
    raise CheckpointError(
        f"{path} holds no complete checkpoint; give the folder of one (step-00000010), of its run, or resume=auto"
    )


def remove_unfinished(root: Path) -> None:
    """Deletes what interrupted saves left under ``root``."""
    if root.is_dir():
        for path in root.iterdir():
            if re.fullmatch(r"\.step-\d{8,}\.(tmp|old)", path.name):
                shutil.rmtree(path, ignore_errors=True)


def move_into_place(unfinished: Path, path: Path) -> None:
    """Gives a written checkpoint its name, replacing one of the same name, and then moves ``latest``."""
    root = path.parent
    sync_folder(unfinished)
    aside = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    unfinished.rename(path)
    sync_folder(root)
    write_whole(root / POINTER, f"{path.name}\n".encode())
    shutil.rmtree(aside, ignore_errors=True)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that exists under its name only with all its bytes on disk."""
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        # What fails in a write does not say which file it was.
        raise OSError(error.errno, error.strerror, str(path)) from None
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes the names inside a folder durable, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is not a plain file; use another checkpoint")
        yield file
