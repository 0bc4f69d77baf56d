"""A checkpoint of any grid loads on any other; a damaged or hostile one is refused and nothing in it runs."""

import errno
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from gridtron.core.checkpoint.find import find_checkpoint, newest_checkpoint
from gridtron.core.checkpoint.layout import CheckpointError, complete_checkpoints, step_path
from gridtron.core.checkpoint.load import load
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.core.checkpoint.save import save
from gridtron.core.checkpoint.sealed import seal
from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.files import Files
from gridtron.core.grid import Grid
from gridtron.core.sharding import Sharding

SHAPES = {
    "parameters/vocabulary": ((101, 3), torch.float32),
    "parameters/down": ((5, 11), torch.bfloat16),
    "parameters/kv": ((12, 2), torch.float64),
    "parameters/norm": ((7,), torch.float64),
    "optimizer/step": ((), torch.int64),
    "optimizer/seen": ((9,), torch.bool),
}


def whole(name: str) -> torch.Tensor:
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    return (torch.rand(shape, generator=generator) * 100).to(dtype)


def sharding_of(name: str, ranks: int) -> Sharding:
    shape, _ = SHAPES[name]
    if ranks == 1 or name in ("parameters/norm", "optimizer/step", "optimizer/seen"):
        return Sharding.whole(shape)
    if name == "parameters/kv":
        # Three KV heads of four rows; the middle one is held by several ranks, and every rank but the first holds the
        # last one apart from it.
        rows: list[tuple[tuple[int, int], ...]] = [((0, 8),), ((4, 12),), ((0, 4), (8, 12)), ((4, 8),)]
        return Sharding(shape, 0, tuple(rows[:ranks]))
    return Sharding.split(shape, 1 if name == "parameters/down" else 0, ranks)


def state_of(tensor: int, rank: int, filled: bool) -> dict[str, ShardedTensorView]:
    """This rank's part at ``rank`` of a grid of data x tensor."""
    state = {}
    for name in SHAPES:
        sharding = sharding_of(name, tensor)
        place = rank % tensor
        full = whole(name)
        if sharding.dim is None:
            local = full.clone()
        else:
            pieces = [full.narrow(sharding.dim, a, b - a) for a, b in sharding.ranges(place)]
            local = torch.cat(pieces, sharding.dim) if pieces else full.narrow(sharding.dim, 0, 0)
        if not filled:
            local = torch.zeros_like(local)
        state[name] = ShardedTensorView(local, sharding, place, rank if sharding.dim is None else rank // tensor)
    return state


def save_ranks(folder: str, tensor: int, extra: dict[str, Any]) -> None:
    with Grid.create(tensor=tensor) as grid:
        save(step_path(Path(folder), extra["step"]), state_of(tensor, grid.rank, filled=True), extra, grid)


def load_ranks(folder: str, tensor: int) -> list[str]:
    with Grid.create(tensor=tensor) as grid:
        state, expected = state_of(tensor, grid.rank, filled=False), state_of(tensor, grid.rank, filled=True)
        extra = load(find_checkpoint(Path(folder)), state, grid)
        assert extra == {"step": 10, "tokens": 12345678901234}
        return [name for name in SHAPES if not torch.equal(state[name].local, expected[name].local)]


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((3, 3), (4, 4)), ((4, 4), (3, 3)), ((4, 2), (3, 3)), ((2, 2), (4, 2))],
)
def test_any_grid_to_any_grid(saved_on: tuple[int, int], loaded_on: tuple[int, int], tmp_path: Path) -> None:
    run_ranks(save_ranks, saved_on[0], str(tmp_path), saved_on[1], {"step": 10, "tokens": 12345678901234})
    assert run_ranks(load_ranks, loaded_on[0], str(tmp_path), loaded_on[1]) == [[]] * loaded_on[0]


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A checkpoint of one process without torch.distributed."""
    path = step_path(tmp_path, 10)
    save(path, state_of(1, 0, filled=True), {"step": 10}, Grid.layout(1))
    return path


def load_alone(path: Path) -> dict[str, ShardedTensorView]:
    state = state_of(1, 0, filled=False)
    load(path, state, Grid.layout(1))
    return state


def test_without_distributed_and_readable_by_safetensors(alone: Path) -> None:
    import safetensors.torch

    assert all(torch.equal(view.local, whole(name)) for name, view in load_alone(alone).items())
    read = safetensors.torch.load_file(alone / "rank-00000.safetensors")
    assert torch.equal(read["parameters/vocabulary@0,0"], whole("parameters/vocabulary"))
    assert sorted(entry.name for entry in alone.parent.iterdir()) == ["latest", "step-00000010"]


def test_each_row_is_written_once(tmp_path: Path) -> None:
    run_ranks(save_ranks, 4, str(tmp_path), 2, {"step": 10})
    manifest = Manifest.read(step_path(tmp_path, 10))
    rows = sorted((piece.offsets[0], piece.sizes[0]) for piece in manifest.tensors["parameters/kv"].pieces)
    assert rows == [(0, 8), (8, 4)]
    elements = sum(piece.numel for entry in manifest.tensors.values() for piece in entry.pieces)
    assert elements == sum(whole(name).numel() for name in SHAPES)


def test_names_and_shapes_are_compared(alone: Path) -> None:
    state = state_of(1, 0, filled=False)
    state["parameters/new"] = state.pop("parameters/norm")
    state["parameters/down"] = ShardedTensorView(torch.zeros(5, 12), Sharding.whole((5, 12)))
    with pytest.raises(CheckpointError) as refused:
        load(alone, state, Grid.layout(1))
    message = str(refused.value)
    assert "not in the checkpoint: parameters/new" in message
    assert "in the checkpoint and not in this run: parameters/norm" in message
    assert "parameters/down has the shape [5, 11] there and [5, 12] here" in message


def load_foreign(folder: str) -> str:
    with Grid.create(tensor=2) as grid:
        state = state_of(2, grid.rank, filled=False)
        if grid.rank == 1:
            state.pop("parameters/norm")
            state["parameters/only_here"] = state.pop("optimizer/step")
        else:
            state.pop("parameters/norm")
        try:
            load(find_checkpoint(Path(folder)), state, grid)
        except CheckpointError as error:
            assert error.agreed
            return str(error)
        return ""


def test_names_are_compared_over_all_ranks(alone: Path) -> None:
    first, second = run_ranks(load_foreign, 2, str(alone.parent))
    assert first == second
    assert "not in the checkpoint: parameters/only_here" in first
    assert "in the checkpoint and not in this run: parameters/norm" in first
    assert "optimizer/step" not in first


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("planted", ["manifest.json", "rank-00000.safetensors", "latest", ".metadata"])
@pytest.mark.parametrize("same_size", [False, True])
def test_a_planted_pickle_never_runs(planted: str, same_size: bool, alone: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = alone.parent / planted if planted == "latest" else alone / planted
    hostile = pickle.dumps(Planted(mark))
    if same_size and path.exists():
        hostile = hostile + b"\0" * (path.stat().st_size - len(hostile))
    path.write_bytes(hostile)
    if planted in (".metadata", "latest"):
        # Not a file of ours, or one for people alone: nobody opens it.
        load_alone(find_checkpoint(alone.parent))
    else:
        with pytest.raises(CheckpointError) as refused:
            load_alone(find_checkpoint(alone.parent))
        assert planted in str(refused.value)
        assert len(str(refused.value).splitlines()) < 12
    assert not mark.exists()
    pickle.loads(hostile)
    assert mark.exists(), "the planted pickle must be one that runs"


def edit_manifest(path: Path, change: Any) -> None:
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    content.pop("xxh3")
    (path / "manifest.json").write_bytes(seal(content))


def kv(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["parameters/kv"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda content: kv(content).update(shape=[12 << 40, 2]), "parameters/kv"),
        (lambda content: kv(content)["pieces"][0].update(sizes=[12 << 40, 2]), "parameters/kv ends at byte"),
        (lambda content: kv(content)["pieces"][0].update(sizes=[8, 2]), "cover 16 of 24"),
        (
            lambda content: kv(content).update(
                pieces=[kv(content)["pieces"][0] | {"offsets": [0, a], "sizes": [12, 1]} for a in (0, 0)]
            ),
            "overlap or leave a gap at 0 of dimension 1",
        ),
        (lambda content: kv(content)["pieces"][0].update(offsets=[-4, 0]), "offset of parameters/kv is -4"),
        (lambda content: kv(content)["pieces"][0].update(start=10**15), "ends at byte"),
        (lambda content: kv(content)["pieces"][0].update(start=True), "start of parameters/kv is True"),
        (lambda content: kv(content).update(pieces=kv(content)["pieces"] * 2), "cover 48 of 24"),
        (lambda content: kv(content).update(dtype="F63"), "unknown dtype 'F63'"),
        (lambda content: kv(content).update(dtype="F32"), "parameters/kv ends at byte"),
        (
            lambda content: content["tensors"]["parameters/down"].update(dtype="F16"),
            "does not begin as manifest.json says",
        ),
        (lambda content: kv(content)["pieces"][0].update(file="../../passwd"), "none of the data files"),
        (lambda content: content["files"].update({"../x": 5}), "'../x'"),
        (lambda content: content["files"].update({"rank-00000.safetensors": 10**14}), "should end at byte"),
        (lambda content: content.pop("tensors"), "no key 'tensors'"),
        (lambda content: content.update(version=1), "version is 1"),
        (lambda content: content.update(extra=[]), "extra"),
    ],
)
def test_sizes_in_the_manifest_are_checked(change: Any, named: str, alone: Path) -> None:
    edit_manifest(alone, change)
    with pytest.raises(CheckpointError) as refused:
        load_alone(alone)
    assert named in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"[" * 100_000, b"\xff\xfe", b'{"format": 1e999}'])
def test_other_manifests_are_refused(content: bytes, alone: Path) -> None:
    (alone / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_alone(alone)


def test_damaged_data_is_refused(alone: Path) -> None:
    data = alone / "rank-00000.safetensors"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="bytes and should have"):
        load_alone(alone)
    flipped = bytearray(content)
    flipped[-1] ^= 1
    data.write_bytes(flipped)
    with pytest.raises(CheckpointError, match="checksum differs"):
        load_alone(alone)
    data.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_alone(alone)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_links_and_pipes_are_refused(name: str, alone: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.move(alone / name, outside)
    (alone / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a link"):
        load_alone(alone)
    (alone / name).unlink()
    os.mkfifo(alone / name)
    with pytest.raises(CheckpointError, match="not a plain file"):
        load_alone(alone)


class FullDisk(Files):
    """Has room for so many bytes."""

    def __init__(self, room: int):
        self.room = room

    def write(self, file: Any, content: Any) -> None:
        self.room -= len(content)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, content)


class Faulty(Files):
    def create(self, path: Path) -> Any:
        return {}["planted"]  # type: ignore[index]


def save_on_a_full_disk(folder: str) -> str:
    with Grid.create(tensor=2) as grid:
        files = Files()
        if grid.rank == 1:
            files = FullDisk(600)
        try:
            save(step_path(Path(folder), 20), state_of(2, grid.rank, filled=True), {"step": 20}, grid, files=files)
        except CheckpointError as error:
            assert error.agreed
            return str(error)
        return ""


def test_a_full_disk_keeps_the_checkpoint_before(alone: Path) -> None:
    first, second = run_ranks(save_on_a_full_disk, 2, str(alone.parent))
    assert first == second
    assert "rank 1 could not write the checkpoint step-00000020: No space left on device" in first
    assert "step-00000010, is intact" in first
    assert sorted(entry.name for entry in alone.parent.iterdir()) == ["latest", "step-00000010"]
    load_alone(find_checkpoint(alone.parent))


def save_with_a_fault(folder: str) -> str:
    with Grid.create(tensor=2) as grid:
        files = Files()
        if grid.rank == 1:
            files = Faulty()
        try:
            save(step_path(Path(folder), 20), state_of(2, grid.rank, filled=True), {"step": 20}, grid, files=files)
        except RuntimeError as error:
            return str(error)
        return ""


@pytest.mark.case(15)
def test_a_fault_in_one_ranks_save_reaches_all_with_its_traceback(tmp_path: Path) -> None:
    for message in run_ranks(save_with_a_fault, 2, str(tmp_path)):
        assert "KeyError: 'planted'" in message
        assert "RANK 1" in message
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_left_is_never_read_and_goes_with_the_next(alone: Path) -> None:
    left = alone.parent / ".step-00000020.tmp"
    shutil.copytree(alone, left)
    assert newest_checkpoint(alone.parent).path == alone
    later = step_path(alone.parent, 30)
    save(later, state_of(1, 0, filled=True), {"step": 30}, Grid.layout(1))
    assert not left.exists()
    assert complete_checkpoints(alone.parent) == [alone, later]
    assert newest_checkpoint(alone.parent).path == later


def test_the_same_step_again_replaces(alone: Path) -> None:
    state = state_of(1, 0, filled=True)
    state["parameters/norm"].local.fill_(3)
    save(alone, state, {"step": 10}, Grid.layout(1))
    assert torch.equal(load_alone(alone)["parameters/norm"].local, torch.full((7,), 3.0, dtype=torch.float64))
    assert sorted(entry.name for entry in alone.parent.iterdir()) == ["latest", "step-00000010"]


def test_a_pointer_to_a_deleted_checkpoint_gives_the_newest_left(alone: Path) -> None:
    later = step_path(alone.parent, 30)
    save(later, state_of(1, 0, filled=True), {"step": 30}, Grid.layout(1))
    shutil.rmtree(later)
    assert newest_checkpoint(alone.parent).path == alone
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_checkpoint(alone.parent / "nothing")
