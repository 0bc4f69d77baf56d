"""Which files a run reads: a file, a pattern, or the Python standard library's own source on this machine."""

from __future__ import annotations

import difflib
import glob
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gridtron.core.errors import JobError

SMALLEST_LIBRARY = 2_000_000
"""Bytes; under this the standard library is not all there (a stripped or zipped Python) and is no data set."""

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class DataError(JobError, ValueError):
    """Data that cannot be read or prepared, with the file, the reason and what to change."""


@dataclass(frozen=True)
class Source:
    """The files of a data set.

    Args:
        kind: "text" (each file a text or jsonl file) or "tokens" (one .bin/.idx pair).
        files: sorted; of "tokens" the .bin and the .idx.
        described: what the user asked for, for messages.
    """

    kind: str
    files: tuple[Path, ...]
    described: str

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)


def find_source(path: str | None) -> Source:
    """The files under ``data.path``, each readable and not all empty.

    Args:
        path: a file, a pattern (``*``, ``?``, ``[...]``, ``**``), the .bin or .idx or common prefix of token files;
            None: the standard library.

    Raises:
        DataError: nothing there, unreadable, empty, mixed; says what to change.
    """
    if path is None:
        return _library_source()
    if not path.strip():
        raise DataError("data.path= is empty; give a file or a pattern, or data.path=null for the standard library")
    files = _matches(path)
    pairs = [file for file in files if file.suffix in (".bin", ".idx")]
    if pairs:
        return _token_source(path, pairs, files)
    for file in files:
        _check_readable(path, file)
    source = Source("text", tuple(files), path)
    if source.size == 0:
        what = "the file is empty" if len(files) == 1 else f"all {len(files)} files are empty"
        raise DataError(f"data.path={path}: {what}; give files with text")
    return source


def _matches(path: str) -> list[Path]:
    """Files that ``path`` names: taken literally if that exists (names may hold ``*`` or ``[``), else as a pattern."""
    literal = Path(path)
    try:
        is_folder = stat.S_ISDIR(literal.stat().st_mode)
    except PermissionError:
        raise DataError(f"data.path={path}: no permission to look there; make its folder readable") from None
    except (FileNotFoundError, NotADirectoryError):
        is_folder = None
    except OSError as fault:
        raise DataError(f"data.path={path}: {fault.strerror}; give a shorter path or a pattern") from None
    if is_folder:
        raise DataError(f"data.path={path}: it is a folder; give a pattern, as in data.path={_pattern_in(literal)}")
    if is_folder is False:
        if not literal.is_file():
            raise DataError(
                f"data.path={path}: it is a pipe or a device, not a file; write its content to a file and give that"
            )
        return [literal]
    if os.path.exists(path + ".bin") and os.path.exists(path + ".idx"):
        return [Path(path + ".bin")]
    if glob.has_magic(path):
        found = sorted(Path(name) for name in glob.glob(path, recursive=True) if os.path.isfile(name))
        if found:
            return found
        raise DataError(f"data.path={path}: no file matches the pattern; {_nearest_there(literal)}")
    raise DataError(f"data.path={path}: no such file; {_nearest_there(literal)}")


def _pattern_in(folder: Path) -> str:
    """A pattern for the most frequent kind of file in a folder."""
    suffixes = [entry.suffix for entry in sorted(folder.iterdir()) if entry.is_file() and entry.suffix]
    return str(folder / f"*{max(set(suffixes), key=suffixes.count, default='.txt')}")


def _nearest_there(path: Path) -> str:
    """What is near a path that is not there: a file of a like name, or the part of the way that exists."""
    folder = path.parent
    try:
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    except PermissionError:
        return f"the folder {folder} cannot be read"
    close = difflib.get_close_matches(path.name, names, 1, 0.6)
    if close:
        return f"nearest: data.path={folder / close[0]}"
    if folder.is_dir():
        return f"the folder {folder.absolute()} holds {len(names)} other entries"
    existing = next((parent for parent in folder.absolute().parents if parent.is_dir()), Path("/"))
    return f"of the way to it only {existing} exists"


def _token_source(path: str, pairs: list[Path], files: list[Path]) -> Source:
    prefixes = {file.with_suffix("") for file in pairs}
    if len(prefixes) > 1 or len(pairs) < len(files):
        raise DataError(
            f"data.path={path}: {len(files)} files with {len(prefixes)} .bin/.idx pairs among them; "
            f"give one pair, as in data.path={min(prefixes)}.bin, or text files alone"
        )
    prefix = prefixes.pop()
    binary, index = prefix.with_suffix(prefix.suffix + ".bin"), prefix.with_suffix(prefix.suffix + ".idx")
    for file in (binary, index):
        if not file.exists():
            raise DataError(
                f"data.path={path}: {file} is missing; a .bin needs its .idx beside it and the other way round"
            )
        _check_readable(path, file)
        if file.stat().st_size == 0:
            raise DataError(f"data.path={path}: {file} is empty; prepare it again from its text")
    return Source("tokens", (binary, index), path)


def _check_readable(path: str, file: Path) -> None:
    try:
        with open(file, "rb"):
            pass
    except OSError as fault:
        raise DataError(
            f"data.path={path}: {file}: {fault.strerror}; make it readable (chmod a+r) or leave it out"
        ) from None


def library_files(folder: Path) -> Iterator[Path]:
    """Python sources under a standard library's folder, sorted; installed packages and test suites left out.

    Test suites are a separate package on some systems, and hold files that are wrong on purpose.
    """
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY and not name.startswith("config-")]
        found += [Path(place, name) for name in names if name.endswith(".py")]
    yield from sorted(found)


def _library_source() -> Source:
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = Source("text", tuple(library_files(folder)), "the Python standard library")
    if source.size < SMALLEST_LIBRARY:
        raise DataError(
            f"data.path=null: the Python standard library in {folder} has only {source.size:,} bytes of source "
            f"(at least {SMALLEST_LIBRARY:,} are needed); give text of your own, as in data.path=~/books/*.txt"
        )
    return source
