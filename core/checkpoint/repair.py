"""Every byte of a checkpoint against its checksum, and what is damaged put back from where it lies once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from gridtron.core.checkpoint.layout import CheckpointError, open_regular
from gridtron.core.checkpoint.manifest import BLOCK, Piece, Place
from gridtron.core.checkpoint.stored import OpenFile, Stored
from gridtron.core.checkpoint.stream import checksum
from gridtron.core.files import Files


@dataclass(frozen=True)
class FileBlock:
    """The bytes of one block at one of its places.

    Args:
        tensor: that they are of.
        place: of the piece in the file.
        number: of the block in the piece.
        first, stop: bytes in the file.
    """

    tensor: str
    place: Place
    number: int
    first: int
    stop: int


@dataclass(frozen=True)
class FileState:
    """What was found out about one data file.

    Args:
        name: of the file.
        fault: of the file as a whole: missing, not a plain file, of another size, with another header; None: none.
        damaged: blocks, in the order of the file. Those of a file that cannot be opened are all of them.
    """

    name: str
    fault: str | None = None
    damaged: tuple[FileBlock, ...] = ()

    @property
    def sound(self) -> bool:
        return self.fault is None and not self.damaged


def check_files(
    stored: Stored, names: Sequence[str] | None = None, advance: Callable[[int], Any] = lambda count: None
) -> list[FileState]:
    """Reads every byte of the data files.

    Args:
        stored: the checkpoint.
        names: of the data files; default all.
        advance: told how many bytes were read since it was called last.
    """
    buffer = memoryview(bytearray(BLOCK))
    return [_check_file(stored, name, buffer, advance) for name in names or list(stored.manifest.files)]


def _check_file(stored: Stored, name: str, buffer: memoryview, advance: Callable[[int], Any]) -> FileState:
    blocks = _blocks(stored, name)
    damaged = []
    try:
        with open_regular(stored.path / name) as opened:
            file = OpenFile(stored.path / name, opened.fileno())
            fault = None
            try:
                stored.check_begin(file)
            except CheckpointError as error:
                fault = str(error)
            for piece, block in blocks:
                if not _is_sound(file, piece, block, buffer):
                    damaged.append(block)
                advance(block.stop - block.first)
    except CheckpointError as error:
        # Nothing of it can be read.
        return FileState(name, str(error), tuple(block for _, block in blocks))
    return FileState(name, fault, tuple(damaged))


def _blocks(stored: Stored, name: str) -> list[tuple[Piece, FileBlock]]:
    """Every block of a data file, in its order."""
    found = []
    for start, tensor, piece in stored.manifest.places(name):
        length = stored.manifest.tensors[tensor].bytes_of(piece)
        for number in range(len(piece.checksums)):
            low, high = number * BLOCK, min((number + 1) * BLOCK, length)
            found.append((piece, FileBlock(tensor, (name, start), number, start + low, start + high)))
    return found


def _is_sound(file: OpenFile, piece: Piece, block: FileBlock, buffer: memoryview) -> bool:
    target = buffer[: block.stop - block.first]
    try:
        return file.read(block.first, target) and checksum(target) == piece.checksums[block.number]
    except CheckpointError:
        # The disk does not give these bytes; it may give others.
        return False


@dataclass
class Repair:
    """Rewrites damaged files of a checkpoint from the places where their bytes are sound.

    Args:
        stored: the checkpoint.
        states: of all its files, from :func:`check_files`.
        files: the disk.
    """

    stored: Stored
    states: Sequence[FileState]
    files: Files = field(default_factory=Files)

    def __post_init__(self) -> None:
        self._damaged: Mapping[tuple[Place, int], FileBlock] = {
            (block.place, block.number): block for state in self.states for block in state.damaged
        }

    def lost(self, state: FileState) -> list[FileBlock]:
        """Blocks of a damaged file that are sound nowhere: with one of these it is not rewritten."""
        damaged = set(state.damaged)
        return [
            block
            for piece, block in _blocks(self.stored, state.name)
            if block in damaged and not self._sources(piece, block)
        ]

    def rewrite(self, state: FileState) -> None:
        """Writes the whole file anew beside the damaged one, and gives it the name when it is on the disk.

        Raises:
            CheckpointError: a source turned out damaged; nothing was changed.
            OSError: the disk is full or cannot be written; nothing was changed.
        """
        assert not self.lost(state), state
        path = self.stored.path / state.name
        aside = path.with_name(f".{path.name}.tmp")
        if path.is_dir() and not path.is_symlink():
            raise CheckpointError(f"{path} is a folder: move it away, and repair again")
        self.files.remove(aside)
        buffer = memoryview(bytearray(BLOCK))
        try:
            with self.files.create(aside) as target, ExitStack() as opened:
                sources: dict[str, OpenFile] = {}
                self.files.write(target, self.stored.manifest.header(state.name))
                for piece, block in _blocks(self.stored, state.name):
                    self._copy(piece, block, opened, sources, buffer)
                    self.files.write(target, buffer[: block.stop - block.first])
                self.files.sync(target)
            self.files.rename(aside, path)
        except BaseException:
            self.files.remove(aside)
            raise
        self.files.sync_folder(path.parent)

    def _sources(self, piece: Piece, block: FileBlock) -> list[Place]:
        """Where the block is sound: in its own file first."""
        places = sorted(piece.places, key=lambda place: place != block.place)
        return [place for place in places if (place, block.number) not in self._damaged]

    def _copy(
        self, piece: Piece, block: FileBlock, opened: ExitStack, sources: dict[str, OpenFile], buffer: memoryview
    ) -> None:
        """Reads one block into ``buffer`` from the first place that has it."""
        for name, start in self._sources(piece, block):
            if name not in sources:
                path = self.stored.path / name
                sources[name] = OpenFile(path, opened.enter_context(open_regular(path)).fileno())
            first = start + block.number * BLOCK
            there = FileBlock(block.tensor, (name, start), block.number, first, first + block.stop - block.first)
            if _is_sound(sources[name], piece, there, buffer):
                return
        raise CheckpointError(
            f"{self.stored.path / block.place[0]}: the source of {block.tensor} changed meanwhile; nothing was changed"
        )
