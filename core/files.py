"""Changes to the disk that must survive a crash, each a method: a test ends the process at any of them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


class Files:
    """What a save does to the disk. Without state; a test's subclass counts, delays, fails or ends the process."""

    def make_folder(self, path: Path) -> None:
        """A new folder; one that exists is an error, since two writers would spoil each other's."""
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """A new file for writing; one that exists is an error."""
        return open(path, "xb")

    def write(self, file: BinaryIO, content: Any) -> None:
        """All of ``content``, bytes or a view of them."""
        with _naming(file):
            file.write(content)

    def sync(self, file: BinaryIO) -> None:
        """Returns when what was written is on the disk."""
        with _naming(file):
            file.flush()
            os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Makes the names inside a folder durable, where the file system can."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """A file takes the place of one that has the new name; a folder needs that name free."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """A folder with all in it, or a file; nothing is wrong where it is gone already."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def folder_aside(path: Path, files: Files) -> Iterator[Path]:
    """A folder to write into, which becomes the new folder ``path`` when all went well, and else is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    files.remove(aside)
    files.make_folder(aside)
    try:
        yield aside
        files.sync_folder(aside)
        files.rename(aside, path)
        files.sync_folder(path.parent)
    except BaseException:
        files.remove(aside)
        raise


@contextlib.contextmanager
def _naming(file: BinaryIO) -> Iterator[None]:
    """What fails in a write does not say of itself which file it was."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from None


def write_whole(path: Path, content: bytes, files: Files | None = None) -> None:
    """Writes a file that exists under its name only with all its bytes on disk."""
    files = files or Files()
    unfinished = path.with_name(f".{path.name}.tmp")
    files.remove(unfinished)
    try:
        with files.create(unfinished) as file:
            files.write(file, content)
            files.sync(file)
        files.rename(unfinished, path)
    except OSError as error:
        files.remove(unfinished)
        raise OSError(error.errno, error.strerror, str(path)) from None
    files.sync_folder(path.parent)
