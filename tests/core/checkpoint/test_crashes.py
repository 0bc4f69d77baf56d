"""A process that ends at any change to the disk loses no checkpoint that was complete, and the next save works."""

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from crashing import CRASHED, CrashingFiles, in_child
from ranks import run_ranks

from gridtron.core.checkpoint.find import newest_checkpoint
from gridtron.core.checkpoint.layout import CheckpointError, complete_checkpoints, step_path
from gridtron.core.checkpoint.load import load
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.core.checkpoint.retention import Retention
from gridtron.core.checkpoint.save import save
from gridtron.core.checkpoint.saver import Saver
from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.files import Files
from gridtron.core.grid import Grid
from gridtron.core.sharding import Sharding


def state_at(step: int, rank: int = 0, ranks: int = 1) -> dict[str, ShardedTensorView]:
    whole = torch.arange(7.0) + 100 * step
    sharding = Sharding.split((7,), 0, ranks)
    rows = torch.cat([whole[a:b] for a, b in sharding.ranges(rank)])
    counter = torch.tensor(step)
    return {
        "parameters/w": ShardedTensorView(rows, sharding, rank),
        "optimizer/w/step": ShardedTensorView(counter, Sharding.whole(()), rank, rank),
    }


def loaded_step(path: Path) -> int:
    """The step of a checkpoint that is sound in every byte."""
    state = state_at(0)
    extra = load(path, state, Grid.layout(1))
    step: int = extra["step"]
    for name, view in state_at(step).items():
        assert torch.equal(state[name].local, view.local), name
    return step


def saved(root: Path, *steps: int) -> None:
    for step in steps:
        save(step_path(root, step), state_at(step), {"step": step}, Grid.layout(1))


def usable(root: Path) -> list[int]:
    """Steps of the complete checkpoints, each of them loaded."""
    return [loaded_step(path) for path in complete_checkpoints(root)]


@pytest.mark.parametrize(
    ("again", "power"),
    [(False, False), (False, True), (True, True), pytest.param(True, False, marks=pytest.mark.slow)],
    ids=["new-killed", "new-without power", "again-without power", "again-killed"],
)
def test_at_every_change(power: bool, again: bool, tmp_path: Path) -> None:
    """Before the crash two checkpoints are complete; afterwards both are, or what takes the place of the second."""
    step = 20 if again else 30
    moments = 0
    while True:
        root = tmp_path / str(moments)
        saved(root, 10, 20)
        files = CrashingFiles(moments, power)
        code = in_child(
            lambda root=root, files=files: save(
                step_path(root, step), state_at(step), {"step": step}, Grid.layout(1), files=files
            )
        )
        newest = newest_checkpoint(root)
        if code == 0:
            break
        assert code == CRASHED
        moments += 1
        left = usable(root)
        if not again:
            assert left in ([10, 20], [10, 20, 30])
            assert newest.path == step_path(root, left[-1])
        else:
            # Between two renames the one that is replaced has another name; the next save gives it back.
            assert left in ([10, 20], [10])
        saved(root, 40)
        assert usable(root) in ([10, 20, 40], [10, 20, 30, 40])
        assert not list(root.glob(".*"))
        assert (root / "latest").read_text() == "step-00000040\n"
        shutil.rmtree(root)
    assert moments > 12
    assert usable(root) == sorted({10, 20, step})


def test_at_every_change_of_a_deletion(tmp_path: Path) -> None:
    moments = 0
    while True:
        root = tmp_path / str(moments)
        saved(root, 10, 20)
        files = CrashingFiles(moments)

        def save_and_prune(root: Path = root, files: Files = files) -> None:
            Saver(Grid.layout(1), retention=Retention(last=1), files=files).save(
                step_path(root, 30), state_at(30), {"step": 30}
            )

        code = in_child(save_and_prune)
        left = usable(root)
        if code == 0:
            break
        moments += 1
        assert left in ([10, 20], [10, 20, 30], [20, 30], [30])
        assert loaded_step(newest_checkpoint(root).path or root) == left[-1]
        saved(root, 40)
        assert usable(root) == [*left, 40] and not list(root.glob(".*"))
        shutil.rmtree(root)
    assert left == [30]


def crash_on_rank(folder: str, crashing: int, at: int) -> str:
    """In the pool, where nobody may end: the crash is an error of the disk."""
    with Grid.create(tensor=2) as grid:

        class Failing(CrashingFiles):
            def _end(self) -> None:
                raise OSError(5, "Input/output error")

            remove = Files.remove

        files = Failing(at) if grid.rank == crashing else Files()
        try:
            save(step_path(Path(folder), 30), state_at(30, grid.rank, 2), {"step": 30}, grid, files=files)
        except CheckpointError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(("rank", "at"), [(0, 2), (1, 0), (1, 1), (1, 3)])
def test_a_rank_whose_disk_fails(rank: int, at: int, tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    first, second = run_ranks(crash_on_rank, 2, str(tmp_path), rank, at)
    assert first == second
    assert f"rank {rank} could not write the checkpoint step-00000030: Input/output error" in first
    assert usable(tmp_path) == [10, 20]


class SlowFiles(Files):
    def sync(self, file: Any) -> None:
        time.sleep(0.5)
        super().sync(file)


@pytest.mark.case(32)
def test_killed_right_after_an_asynchronous_save_returned(tmp_path: Path) -> None:
    """The pointer has not moved, and what is there is known to be incomplete."""
    saved(tmp_path, 10)

    def save_and_die() -> None:
        saver = Saver(Grid.layout(1), asynchronous=True, files=SlowFiles())
        saver.save(step_path(tmp_path, 20), state_at(20), {"step": 20})
        assert saver.busy and not saver.finished
        time.sleep(0.2)
        signal.raise_signal(signal.SIGKILL)

    assert in_child(save_and_die) == -signal.SIGKILL
    assert (tmp_path / "latest").read_text() == "step-00000010\n"
    found = newest_checkpoint(tmp_path)
    assert found.path is not None and loaded_step(found.path) == 10
    assert found.skipped == (".step-00000020.tmp: the job that was writing it ended before it was complete",)


@pytest.mark.case(32)
@pytest.mark.parametrize("damage", ["truncated", "longer", "missing", "manifest", "header", "no manifest"])
def test_a_damaged_newest_is_skipped_by_name(damage: str, tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    newest = step_path(tmp_path, 20)
    data = newest / "rank-00000.safetensors"
    content = data.read_bytes()
    if damage == "no manifest":
        data = newest / "manifest.json"
        data.unlink()
    elif damage == "manifest":
        data = newest / "manifest.json"
        data.write_bytes(data.read_bytes()[:-20])
    elif damage == "missing":
        data.unlink()
    else:
        changed = {"truncated": content[:-1], "longer": content + b"\0", "header": content[:20] + b"x" + content[21:]}
        data.write_bytes(changed[damage])
    found = newest_checkpoint(tmp_path)
    assert found.path == step_path(tmp_path, 10) and found.damaged
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("step-00000020: ") and data.name in found.skipped[0]


def test_a_renamed_checkpoint_is_not_believed_by_its_name(tmp_path: Path) -> None:
    for step in (10, 20):
        extra = {"progress": {"step": step, "position": step, "tokens": step}}
        save(step_path(tmp_path, step), state_at(step), extra, Grid.layout(1))
    step_path(tmp_path, 20).rename(step_path(tmp_path, 99))
    found = newest_checkpoint(tmp_path)
    assert found.path == step_path(tmp_path, 10)
    assert found.skipped[0].startswith("step-00000099: its manifest is of step 20: somebody renamed it")


# -------------------------------------------------------------------- saving behind the run
class CountedFiles(Files):
    """Tells what is written while a save is under way."""

    def __init__(self, gate: Any):
        self.gate = gate

    def create(self, path: Path) -> Any:
        self.gate()
        return super().create(path)


def test_what_is_written_is_the_state_of_the_call(tmp_path: Path) -> None:
    """Weights, counters and values that change while the thread waits are saved as they were."""
    state, extra = state_at(10), {"step": 10, "callbacks": {"A": {"seen": [1]}}}
    moved = []

    def gate() -> None:
        while not moved:
            time.sleep(0.01)

    saver = Saver(Grid.layout(1), asynchronous=True, files=CountedFiles(gate))
    saver.save(step_path(tmp_path, 10), state, extra)
    for view in state.values():
        view.local.add_(1000)
    extra["callbacks"]["A"]["seen"].append(2)  # type: ignore[index]
    assert not saver.finished and not (tmp_path / "latest").exists()
    moved.append(True)
    saver.wait()
    assert loaded_step(step_path(tmp_path, 10)) == 10
    assert Manifest.read(step_path(tmp_path, 10)).extra["callbacks"] == {"A": {"seen": [1]}}
    # The copies' memory serves again, and the one before is complete first.
    saver.save(step_path(tmp_path, 20), state_at(20), {"step": 20})
    saver.save(step_path(tmp_path, 30), state_at(30), {"step": 30})
    assert complete_checkpoints(tmp_path)[1] == step_path(tmp_path, 20)
    saver.wait()
    assert usable(tmp_path) == [10, 20, 30]


def save_behind(folder: str, fail: bool) -> list[str]:
    class FullDisk(Files):
        def write(self, file: Any, content: Any) -> None:
            raise OSError(28, "No space left on device")

    with Grid.create(tensor=2) as grid:
        told = []
        saver = Saver(grid, asynchronous=True, files=FullDisk() if fail and grid.rank == 1 else Files())
        for step in (20, 30):
            try:
                saver.save(step_path(Path(folder), step), state_at(step, grid.rank, 2), {"step": step})
            except CheckpointError as error:
                told.append(str(error))
        try:
            saver.wait()
        except CheckpointError as error:
            told.append(str(error))
        return told


@pytest.mark.parametrize("fail", [False, True])
def test_over_ranks(fail: bool, tmp_path: Path) -> None:
    saved(tmp_path, 10)
    first, second = run_ranks(save_behind, 2, str(tmp_path), fail)
    assert first == second
    assert usable(tmp_path) == ([10] if fail else [10, 20, 30])
    assert len(first) == (1 if fail else 0), "told by the second call, which then begins nothing"
    for message in first:
        assert "rank 1 could not write the checkpoint" in message and "step-00000010, is intact" in message
