"""What is damaged is found and named; where the bytes lie once more they are put back, else nothing is touched."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import RANKS, small_checkpoint, small_tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from gridtron.core.checkpoint.layout import CheckpointError, step_path
from gridtron.core.checkpoint.repair import Repair, check_files
from gridtron.core.checkpoint.save import save
from gridtron.core.checkpoint.stored import Stored
from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.files import Files
from gridtron.core.grid import Grid
from gridtron.core.sharding import Sharding


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "step-00000010")


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place, 2 if place < 0 else 0)
        byte = file.read(1)
        file.seek(place, 2 if place < 0 else 0)
        file.write(bytes([byte[0] ^ 0x10]))


def repaired(folder: Path, files: Files | None = None) -> list[str]:
    """Checks, rewrites what can be, and returns the names of files that are damaged afterwards."""
    found = Stored(folder)
    states = check_files(found)
    repair = Repair(found, states, files or Files())
    for state in states:
        if not state.sound and not repair.lost(state):
            repair.rewrite(state)
    return [state.name for state in check_files(Stored(folder)) if not state.sound]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_sound_files_are_left_alone(folder: Path) -> None:
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    told: list[int] = []
    assert all(state.sound for state in check_files(Stored(folder), advance=told.append))
    data = sum(2 * tensor.nbytes for tensor in small_tensors().values())
    assert sum(told) == data
    assert repaired(folder) == [] and {path.name: path.stat().st_ino for path in folder.iterdir()} == before


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a byte of a tensor": lambda path: flip(path, -3),
    "a byte of the header": lambda path: flip(path, 20),
    "the header's length": lambda path: flip(path, 0),
    "cut in a tensor": lambda path: os.truncate(path, path.stat().st_size - 50),
    "cut in the header": lambda path: os.truncate(path, 30),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "missing": lambda path: path.unlink(),
    "another file of its size": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "a link": lambda path: (path.rename(path.parent.parent / "elsewhere"), path.symlink_to("../elsewhere")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("file", RANKS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_to_one_file_is_repaired_to_the_bit(damage: str, file: str, folder: Path) -> None:
    before = content(folder)
    DAMAGES[damage](folder / file)
    states = {state.name: state for state in check_files(Stored(folder))}
    assert [name for name, state in states.items() if not state.sound] == [file]
    assert states[file].fault is None or file in states[file].fault
    assert repaired(folder) == []
    assert content(folder) == before and not (folder / file).is_symlink()


def test_what_a_link_points_to_is_not_written(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (folder / RANKS[0]).unlink()
    (folder / RANKS[0]).hardlink_to(outside)
    assert repaired(folder) == [] and outside.read_bytes() == b"mine"
    (folder / RANKS[1]).unlink()
    (folder / RANKS[1]).symlink_to(outside)
    assert repaired(folder) == [] and outside.read_bytes() == b"mine"


def test_two_files_damaged_at_other_places_help_each_other(folder: Path) -> None:
    before = content(folder)
    tensors = Stored(folder).manifest
    (first, name, _), *_ = tensors.places(RANKS[0])
    flip(folder / RANKS[0], first)
    other = next(start for start, found, _ in tensors.places(RANKS[2]) if found != name)
    flip(folder / RANKS[2], other)
    assert repaired(folder) == [] and content(folder) == before


def test_a_block_that_is_lost_everywhere_is_named_and_nothing_touched(folder: Path) -> None:
    manifest = Stored(folder).manifest
    name = "parameters/blocks.1.up.weight"
    piece = manifest.tensors[name].pieces[1]
    for file, start in piece.places:
        flip(folder / file, start + 1)
    flip(folder / RANKS[0], -1)
    before = content(folder)
    found = Stored(folder)
    states = {state.name: state for state in check_files(found)}
    repair = Repair(found, list(states.values()))
    assert repair.lost(states[RANKS[0]]) == []
    for file in (RANKS[1], RANKS[2]):
        (block,) = repair.lost(states[file])
        assert (block.tensor, block.stop - block.first) == (name, piece.numel * 2)
    assert repaired(folder) == [RANKS[1], RANKS[2]]
    after = content(folder)
    assert {name for name in before if before[name] != after[name]} == {RANKS[0]}


def test_without_copies_only_what_the_file_itself_has_is_put_back(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "step-00000010", copied=False)
    before = content(folder)
    flip(folder / RANKS[0], 12)
    assert repaired(folder) == [] and content(folder) == before
    os.truncate(folder / RANKS[0], len(before[RANKS[0]]) - 1)
    assert repaired(folder) == [RANKS[0]]


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_byte_is_found_and_put_back(folder: Path, data: Any) -> None:
    file = data.draw(st.sampled_from(RANKS))
    path = folder / file
    before = content(folder)
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    assert [state.name for state in check_files(Stored(folder)) if not state.sound] == [file]
    assert repaired(folder) == [] and content(folder) == before


# ---------------------------------------------------------------- the disk
class Failing(Files):
    def __init__(self, failing: str, fault: BaseException):
        self.failing, self.fault = failing, fault
        self.order: list[str] = []

    def _pass(self, name: str) -> None:
        self.order.append(name)
        if name == self.failing:
            raise self.fault

    def write(self, file: Any, content: Any) -> None:
        self._pass("write")
        super().write(file, content)

    def sync(self, file: Any) -> None:
        self._pass("sync")
        super().sync(file)

    def rename(self, old: Path, new: Path) -> None:
        self._pass("rename")
        super().rename(old, new)


@pytest.mark.parametrize("failing", ["write", "sync", "rename"])
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_repair_that_fails_leaves_the_damaged_file(failing: str, fault: BaseException, folder: Path) -> None:
    flip(folder / RANKS[0], -1)
    before = content(folder)
    with pytest.raises(type(fault)):
        repaired(folder, Failing(failing, fault))
    assert content(folder) == before


def test_the_name_is_given_after_the_bytes_are_on_the_disk(folder: Path) -> None:
    (folder / RANKS[1]).unlink()
    files = Failing("nothing", KeyError())
    assert repaired(folder, files) == []
    assert files.order[-2:] == ["sync", "rename"] and set(files.order[:-2]) == {"write"}


def test_a_source_that_changes_meanwhile_is_not_taken(folder: Path) -> None:
    (folder / RANKS[0]).unlink()
    found = Stored(folder)
    states = check_files(found)
    _, _, piece = found.manifest.places(RANKS[0])[0]
    flip(folder / RANKS[2], dict(piece.places)[RANKS[2]])
    before = content(folder)
    with pytest.raises(CheckpointError, match="changed meanwhile"):
        Repair(found, states).rewrite(states[0])
    assert content(folder) == before


def test_a_folder_in_the_place_of_a_file_is_named(folder: Path) -> None:
    (folder / RANKS[0]).unlink()
    (folder / RANKS[0]).mkdir()
    with pytest.raises(CheckpointError, match="is a folder: move it away"):
        repaired(folder)


# ---------------------------------------------------------------- copies that ranks wrote
SHAPES = {"matrix": (10, 4), "vector": (5,)}


def save_copied(root: str, copies: int) -> None:
    """Two tensor ranks and two data ranks: matrices in rows over the first, each held twice over the second."""
    with Grid.create(tensor=2) as grid:
        state = {}
        for name, shape in SHAPES.items():
            whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
            sharding = Sharding.split(shape, 0, 2) if len(shape) == 2 else Sharding.whole(shape)
            (low, high), *_ = sharding.ranges(grid.tensor.rank) if len(shape) == 2 else ((0, shape[0]),)
            replica = grid.data.rank if len(shape) == 2 else grid.rank
            state[name] = ShardedTensorView(whole[low:high].clone(), sharding, grid.tensor.rank, replica)
        save(step_path(Path(root), 1), state, {}, grid, copies=copies)


def test_ranks_write_copies_from_which_any_one_file_comes_back(tmp_path: Path) -> None:
    run_ranks(save_copied, 4, str(tmp_path / "kept"), 2)
    path = step_path(tmp_path / "kept", 1)
    manifest = Stored(path).manifest
    assert all(len(piece.places) == 2 for entry in manifest.tensors.values() for piece in entry.pieces)
    assert len(manifest.files) == 4
    for number, file in enumerate(manifest.files):
        folder = tmp_path / f"try-{number}"
        shutil.copytree(path, folder)
        (folder / file).unlink()
        assert repaired(folder) == [] and content(folder) == content(path)
