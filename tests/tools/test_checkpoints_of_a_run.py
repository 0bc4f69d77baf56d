"""What a run does with its checkpoints: which it goes on from, which it keeps, and what it says of them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from toy_run import losses, rows

from gridtron.core.checkpoint.layout import complete_checkpoints, step_of, step_path
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.tools.cli import main

pytestmark = pytest.mark.usefixtures("toy")


def steps_of(tmp_path: Path, name: str = "run") -> list[int]:
    return [step_of(path) or 0 for path in complete_checkpoints(tmp_path / name / "checkpoints")]


@pytest.mark.case(32)
@pytest.mark.parametrize("damage", ["truncated", pytest.param("interrupted", marks=pytest.mark.slow)])
def test_the_newest_that_can_be_used(damage: str, train: Any, tmp_path: Path) -> None:
    assert train("checkpoint.every=2", "train.stop_after=4", "grid.tensor=2")[0] == 0
    root = tmp_path / "run" / "checkpoints"
    if damage == "truncated":
        shard = root / "step-00000004" / "rank-00001.safetensors"
        shard.write_bytes(shard.read_bytes()[:-5])
        expected = f"skipped step-00000004: {shard} has "
    else:
        (root / "step-00000004").rename(root / ".step-00000004.tmp")
        expected = "skipped .step-00000004.tmp: the job that was writing it ended before it was complete"
    code, printed = train(small=False)
    assert code == 0, printed
    assert expected in printed.replace("\n", "")
    assert f"goes on from {root / 'step-00000002'}" in printed.replace("\n", "")
    assert train(directory=str(tmp_path / "unbroken"))[0] == 0
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert dict(losses(tmp_path)) == pytest.approx(dict(losses(tmp_path, "unbroken")), rel=1e-12)


@pytest.mark.parametrize("missing", [False, True])
def test_a_run_of_whose_checkpoints_none_can_be_used_does_not_begin_anew(
    missing: bool, train: Any, tmp_path: Path
) -> None:
    assert train("checkpoint.every=2", "train.stop_after=4")[0] == 0
    for manifest in (tmp_path / "run" / "checkpoints").glob("*/manifest.json"):
        manifest.unlink() if missing else manifest.write_bytes(b"{}")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    code, printed = train(small=False)
    assert code == 2
    for expected in ("no checkpoint of", "can be used", "step-00000004: ", "step-00000002: "):
        assert expected in printed
    assert len(printed.splitlines()) < 12
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_going_back_takes_another_way(train: Any, tmp_path: Path) -> None:
    """From an older checkpoint of its own: the newer ones keep their data and lose their names, so that a job that is
    killed on the new way does not come back on the old one."""
    assert train("checkpoint.every=2")[0] == 0
    assert steps_of(tmp_path) == [2, 4, 6]
    root = tmp_path / "run" / "checkpoints"
    new_way = ("optimizer.lr=0.5", "checkpoint.allow_changes=true", "checkpoint.every=100")
    code, printed = train(f"checkpoint.resume={root / 'step-00000002'}", *new_way, "train.stop_after=3", small=False)
    assert code == 0, printed
    assert "step-00000004 is of what the run did after that, and is called step-00000004.aside-1 now" in printed
    assert steps_of(tmp_path) == [2, 3]
    Manifest.read(root / "step-00000006.aside-1")
    code, printed = train(small=False)
    assert code == 0 and "goes on from" in printed and "step-00000003" in printed
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert (root / "latest").read_text() == "step-00000006\n"
    assert train(f"checkpoint.resume={root / 'step-00000003'}", "checkpoint.every=1", small=False)[0] == 0
    assert (root / "step-00000006.aside-2").is_dir()


def test_commands_on_a_run_say_what_they_skipped(train: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("checkpoint.every=2", "train.stop_after=4")[0] == 0
    data = tmp_path / "run" / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-5])
    run, target = tmp_path / "run", tmp_path / "w.safetensors"
    for words in (["export", f"path={run}", f"target={target}"], ["diff", f"path={run}", f"other={run}"]):
        assert main(["checkpoint", *words]) == 0
        assert "skipped step-00000004: " in capfd.readouterr().err


def test_keep(train: Any, tmp_path: Path) -> None:
    options = ("train.steps=12", "checkpoint.every=2", "checkpoint.keep=2", "checkpoint.keep_every=6", "grid.data=2")
    assert train(*options)[0] == 0
    assert steps_of(tmp_path) == [6, 10, 12]
    options += ("checkpoint.keep_best=1", "checkpoint.keep_metric=loss", "checkpoint.asynchronous=true")
    assert train(*options, "optimizer.lr=0.05", "lr_schedule=constant", directory=str(tmp_path / "best"))[0] == 0
    by_step = {row["step"]: row["loss"] for row in rows(tmp_path, "best")}
    best = min((loss, step) for step, loss in by_step.items() if step % 2 == 0)[1]
    assert steps_of(tmp_path, "best") == sorted({6, 10, 12, best})


def test_a_checkpoint_knows_its_run_wherever_it_lies(train: Any, tmp_path: Path) -> None:
    assert train("train.stop_after=3")[0] == 0
    away = tmp_path / "away" / "step-00000003"
    shutil.copytree(step_path(tmp_path / "run" / "checkpoints", 3), away)
    plan = Manifest.read(away).extra["plan"]
    assert plan["train"]["steps"] == 6 and plan["optimizer"]["name"] == "adamw"
    code, printed = train(f"checkpoint.resume={away}", "optimizer.lr=3", directory=str(tmp_path / "second"))
    assert code == 2
    assert "optimizer.lr: 0.0003 -> 3.0" in printed
    assert train(f"checkpoint.resume={away}", directory=str(tmp_path / "third"))[0] == 0
    assert train(directory=str(tmp_path / "unbroken"))[0] == 0
    assert losses(tmp_path, "third") == losses(tmp_path, "unbroken")[3:]


def test_another_global_batch_size_by_word(train: Any, tmp_path: Path) -> None:
    assert train("train.stop_after=3")[0] == 0
    code, printed = train("train.global_batch_size=8", small=False)
    assert code == 2 and "train.global_batch_size: 4 -> 8" in printed
    assert train("train.global_batch_size=8", "checkpoint.allow_changes=true", small=False)[0] == 0
    positions = [Manifest.read(step_path(tmp_path / "run" / "checkpoints", s)).extra["progress"] for s in (3, 6)]
    assert [(place["position"], place["tokens"]) for place in positions] == [(12, 48), (40, 144)], (
        "36, and the rest of the epoch is less than a batch"
    )


@pytest.mark.case(30)
def test_names_that_differ_and_the_word_that_lets_them(train: Any, tmp_path: Path) -> None:
    """A parameter under another name: both names are told, by all ranks as one; strict=false takes what fits."""
    assert train("train.stop_after=3", "grid.tensor=2")[0] == 0
    folder = step_path(tmp_path / "run" / "checkpoints", 3)
    manifest = Manifest.read(folder)
    renamed = {name.replace("parameters/w", "parameters/v"): entry for name, entry in manifest.tensors.items()}
    changed = Manifest(renamed, manifest.files, manifest.extra)
    for file in manifest.files:
        content = (folder / file).read_bytes()
        body = content[len(manifest.header(file)) :]
        assert len(changed.header(file)) == len(manifest.header(file))
        (folder / file).write_bytes(changed.header(file) + body)
    (folder / "manifest.json").write_bytes(changed.to_json())
    code, printed = train(small=False)
    assert code == 1
    assert "not in the checkpoint: parameters/w" in printed
    assert "in the checkpoint and not in this run: parameters/v" in printed
    assert printed.count("not in the checkpoint") == 1 and "Traceback" not in printed
    code, printed = train("checkpoint.strict=false", small=False)
    assert code == 0
    assert "checkpoint.strict=false: not in the checkpoint: parameters/w" in printed
