"""Disks that end the process at one of the changes made to them: as by SIGKILL, or as by a loss of power."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gridtron.core.files import Files

CRASHED = 77


class CrashingFiles(Files):
    """Ends the process at change number ``at`` (from 0), in the middle of it where it is a write.

    Args:
        at: which change is the last.
        power: what was not made durable by then is lost as well: bytes of files that were not synced, names in folders
            that were not.
        before: called when the process is about to end.
    """

    def __init__(self, at: int, power: bool = False, before: Callable[[], None] = lambda: None):
        self.at, self.power, self.before = at, power, before
        self.done = 0
        self.unsynced: set[Path] = set()
        self.undo: list[tuple[Path, Callable[[], None]]] = []

    def _crash_here(self) -> bool:
        self.done += 1
        return self.done > self.at

    def _end(self) -> None:
        self.before()
        if self.power:
            for path in self.unsynced:
                if path.exists():
                    os.truncate(path, path.stat().st_size // 2)
            for _, undo in reversed(self.undo):
                undo()
        os._exit(CRASHED)

    def make_folder(self, path: Path) -> None:
        if self._crash_here():
            self._end()
        super().make_folder(path)

    def create(self, path: Path) -> Any:
        if self._crash_here():
            self._end()
        self.unsynced.add(path)
        return super().create(path)

    def write(self, file: Any, content: Any) -> None:
        if self._crash_here():
            super().write(file, content[: len(content) // 2])
            file.flush()
            self._end()
        super().write(file, content)

    def sync(self, file: Any) -> None:
        if self._crash_here():
            file.flush()
            self._end()
        super().sync(file)
        self.unsynced.discard(Path(file.name))

    def sync_folder(self, path: Path) -> None:
        if self._crash_here():
            self._end()
        super().sync_folder(path)
        self.undo = [(folder, undo) for folder, undo in self.undo if folder != path]

    def rename(self, old: Path, new: Path) -> None:
        if self._crash_here():
            self._end()
        before = new.read_bytes() if new.is_file() else None
        super().rename(old, new)
        self.unsynced = {Path(str(path).replace(str(old), str(new), 1)) for path in self.unsynced}

        def undo() -> None:
            os.rename(new, old)
            if before is not None:
                new.write_bytes(before)

        self.undo.append((new.parent, undo))

    def remove(self, path: Path) -> None:
        if self._crash_here():
            # A folder whose files are half gone.
            if path.is_dir():
                for entry in sorted(path.iterdir())[:1]:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            self._end()
        super().remove(path)


def in_child(action: Callable[[], None]) -> int:
    """Runs ``action`` in a forked child; its exit code: 0, CRASHED, or 1 for an exception."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
