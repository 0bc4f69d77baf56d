"""``gridtron train`` around a model of seven numbers: starts, folders, resuming."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_run import SMALL, losses, rows

from gridtron.core.training.metrics import read_rows
from gridtron.tools.run_directory import RunLock, changed_mathematics, requested_directory
from gridtron.tools.run_environment import source_commit
from gridtron.tools.train import main

pytestmark = pytest.mark.usefixtures("toy")


# -------------------------------------------------------------------- a run and its folder
def test_a_run_leaves_what_the_contract_names(train: Any, tmp_path: Path) -> None:
    code, printed = train("grid.tensor=2", "evaluation.every=3", "logging.tensorboard=true")
    assert code == 0, printed
    folder = tmp_path / "run"
    assert {entry.name for entry in folder.iterdir()} == {
        *("metrics.jsonl", "config.yaml", "environment.json", "checkpoints", "tensorboard", "stacks")
    }
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert len([row for row in read_rows(folder / "metrics.jsonl") if "eval_loss" in row]) == 2
    assert yaml.safe_load((folder / "config.yaml").read_text())["grid"]["tensor"] == 2
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["data"] == [{"file": "toy", "bytes": 40}]
    assert environment["world_size"] == 2
    assert {"torch", "python", "gridtron"} <= set(environment["versions"])
    assert environment["seed"] == 0
    assert list(Path.cwd().iterdir()) == [], "nothing is written beside the run's folder"
    assert "tensor 2" in printed
    assert "done: 6 steps" in printed


def test_without_a_directory_one_is_made_under_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL]) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-tiny")
    assert (folder / "metrics.jsonl").exists()
    assert str(folder) in capfd.readouterr().err


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "first",
    [
        ("grid.data=2", "train.micro_batch_size=1"),
        ("grid.tensor=3",),
        pytest.param(("grid.tensor=2",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_interrupted_run_goes_on_on_another_grid(first: tuple[str, ...], train: Any, tmp_path: Path) -> None:
    assert train(directory=str(tmp_path / "whole"))[0] == 0
    code, printed = train(*first, "train.stop_after=3")
    assert code == 0
    assert "stopped after step 3 of 6" in printed
    code, printed = train("grid.tensor=1", "grid.data=1", "train.micro_batch_size=4", small=False)
    assert code == 0, printed
    assert "goes on from" in printed
    for (step, loss), (whole_step, whole_loss) in zip(losses(tmp_path), losses(tmp_path, "whole"), strict=True):
        assert step == whole_step
        assert loss == pytest.approx(whole_loss, rel=1e-12)


def test_the_same_grid_goes_on_to_the_bit(train: Any, tmp_path: Path) -> None:
    assert train("grid.tensor=2", directory=str(tmp_path / "whole"))[0] == 0
    assert train("grid.tensor=2", "train.stop_after=2")[0] == 0
    assert train(small=False)[0] == 0
    assert losses(tmp_path) == losses(tmp_path, "whole")


def test_a_finished_run_says_so(train: Any, tmp_path: Path) -> None:
    assert train()[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    code, printed = train()
    assert code == 0
    assert "finished: 6 of 6 steps" in printed
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_stop_that_is_behind_says_so(train: Any) -> None:
    assert train("train.stop_after=3")[0] == 0
    code, printed = train("train.stop_after=2")
    assert code == 0
    assert "3 steps are done" in printed


def test_rows_after_the_checkpoint_are_cut(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(directory=str(tmp_path / "whole"))[0] == 0
    monkeypatch.setenv("TOY_FAULT", "step:0:5")
    assert train("checkpoint.every=2")[0] == 1
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4]
    (tmp_path / "run" / "metrics.jsonl").open("a").write('{"step": 5, "loss": 7.0, "grad_norm": 1.0}\n{"step": 6')
    monkeypatch.delenv("TOY_FAULT")
    code, printed = train("checkpoint.every=2")
    assert code == 0
    assert "1 rows of metrics.jsonl after step 4 were cut" in printed
    assert losses(tmp_path) == losses(tmp_path, "whole")


def test_a_run_without_a_checkpoint_starts_again(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAULT", "step:0:4")
    assert train()[0] == 1
    monkeypatch.delenv("TOY_FAULT")
    code, printed = train("optimizer.lr=0.1")
    assert code == 0
    assert "holds no checkpoint: starts from step 1" in printed
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_changes_of_the_mathematics_are_listed_and_need_a_word(train: Any, tmp_path: Path) -> None:
    assert train("train.stop_after=3")[0] == 0
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    changes = ("optimizer.lr=0.5", "train.seed=7", "train.steps=8")
    code, printed = train(*changes, small=False)
    assert code == 2
    for expected in ("optimizer.lr: 0.0003 -> 0.5", "train.seed: 0 -> 7", "train.steps: 6 -> 8", "allow_changes=true"):
        assert expected in printed
    assert len(printed.splitlines()) < 12
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files
    assert train(*changes, "checkpoint.allow_changes=true", small=False)[0] == 0
    assert len(rows(tmp_path)) == 8
    # The permission was for that start alone.
    assert train("train.steps=9", small=False)[0] == 2


def test_changes_of_the_layout_are_free(train: Any) -> None:
    assert train("train.stop_after=3")[0] == 0
    free = ("grid.tensor=2", "recompute=full", "train.micro_batch_size=4", "evaluation.every=2", "checkpoint.every=2",
            "logging.every=5", "data_parallel.bucket_bytes=1000", "train.max_nonfinite=3")  # fmt: skip
    code, printed = train(*free, small=False)
    assert code == 0, printed


def test_the_same_option_file_again_changes_nothing(train: Any, tmp_path: Path) -> None:
    assert train("optimizer=sgd", "optimizer.lr=0.02", "train.stop_after=3")[0] == 0
    code, printed = train("optimizer=sgd", small=False)
    assert code == 0, printed
    assert rows(tmp_path)[-2]["lr"] <= 0.02
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["optimizer"]["lr"] == 0.02


def test_never_resuming_refuses_to_overwrite(train: Any, tmp_path: Path) -> None:
    assert train("checkpoint.resume=never")[0] == 0
    code, printed = train("checkpoint.resume=never")
    assert code == 2
    assert "would be overwritten" in printed
    (tmp_path / "empty").mkdir()
    assert train("checkpoint.resume=never", directory=str(tmp_path / "empty"))[0] == 0


def test_a_run_begins_from_another_runs_checkpoint(train: Any, tmp_path: Path) -> None:
    assert train("checkpoint.every=2")[0] == 0
    start = tmp_path / "run" / "checkpoints" / "step-00000002"
    code, printed = train(f"checkpoint.resume={start}", "checkpoint.every=2", directory=str(tmp_path / "second"))
    assert code == 0, printed
    assert losses(tmp_path, "second") == losses(tmp_path)[2:]
    # The same command again goes on with what the second run did itself.
    code, printed = train(f"checkpoint.resume={start}", directory=str(tmp_path / "second"))
    assert "finished" in printed
    # Its own checkpoint is gone back to.
    own = tmp_path / "second" / "checkpoints" / "step-00000004"
    code, printed = train(f"checkpoint.resume={own}", directory=str(tmp_path / "second"))
    assert code == 0
    assert f"goes on from {own}" in printed
    code, printed = train(f"checkpoint.resume={start}", "optimizer.lr=3", directory=str(tmp_path / "third"))
    assert code == 2
    assert "optimizer.lr: 0.0003 -> 3.0" in printed
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("damage", ["{", "[1, 2]", "model: 3", "\x00"])
def test_a_damaged_configuration_is_named(damage: str, train: Any, tmp_path: Path) -> None:
    assert train("train.stop_after=3")[0] == 0
    (tmp_path / "run" / "config.yaml").write_text(damage)
    code, printed = train()
    assert code == 2
    assert "config.yaml" in printed
    assert len(printed.splitlines()) < 12
    assert "Traceback" not in printed


def test_results_without_a_configuration_are_not_overwritten(train: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    code, printed = train()
    assert code == 2
    assert "no config.yaml" in printed
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_damaged_checkpoint_ends_in_a_message(train: Any, tmp_path: Path) -> None:
    assert train("train.stop_after=3", "grid.tensor=2")[0] == 0
    data = tmp_path / "run" / "checkpoints" / "step-00000003" / "rank-00000.safetensors"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    code, printed = train(small=False)
    assert code == 1
    assert "rank-00000.safetensors: the bytes of " in printed
    assert "checksum differs" in printed
    data.write_bytes(whole[:-8])
    refused, told = train(small=False)
    assert refused == 2, "its size is wrong: found before anything is started"
    assert "bytes and should have" in told
    assert "Traceback" not in printed + told


def test_two_jobs_do_not_share_a_folder(train: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run")
    code, printed = train()
    assert code == 2
    assert "another job is writing there" in printed
    assert list((tmp_path / "run").iterdir()) == []
    lock.release()
    assert train()[0] == 0


def test_a_refused_request_leaves_no_folder(train: Any, tmp_path: Path) -> None:
    code, printed = train("train.steps=-1", "grid.tenzor=2")
    assert code == 2
    assert "train.steps=-1" in printed
    assert "grid.tenzor" in printed
    assert not (tmp_path / "run").exists()


def test_the_folder_is_read_off_the_command_line() -> None:
    assert requested_directory(["train.steps=3"]) is None
    assert requested_directory(["run.directory=null"]) is None
    assert requested_directory(["run.directory=a b,c=d"]) == Path.cwd() / "a b,c=d"
    assert requested_directory(["run.directory='it\\'s'", "x=y"]) == Path.cwd() / "it's"
    assert requested_directory(["run.directory=~/x"]) == Path.home() / "x"


def test_where_data_is_kept_is_no_mathematics() -> None:
    plan = {"data": {"path": "a", "directory": "b"}, "train": {"seed": 1, "micro_batch_size": 2}}
    changed = {"data": {"path": "c", "directory": "d"}, "train": {"seed": 1, "micro_batch_size": 4}}
    assert changed_mathematics(plan, changed) == ["data.path: a -> c"]


def test_the_commit_of_a_clone_is_told(tmp_path: Path) -> None:
    assert source_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    commit = source_commit(tmp_path)
    assert commit is not None and len(commit) == 40


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", ["model.num_layers=3", "optimizer=sgd", "model.hidden_size=64"])
def test_other_tensors_are_refused_whatever_is_allowed(change: str, train: Any, tmp_path: Path) -> None:
    assert train("train.stop_after=3")[0] == 0
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    code, printed = train(change, "checkpoint.allow_changes=true", small=False)
    assert code == 2 and "holds other tensors" in printed and "does not help here" in printed
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before
    assert train(small=False)[0] == 0


def test_a_start_whose_checkpoint_cannot_be_loaded_changes_nothing(train: Any, tmp_path: Path) -> None:
    """What the decision cannot foresee is found by loading; the run's own configuration and rows stay as they were."""
    assert train("train.stop_after=3")[0] == 0
    data = next((tmp_path / "run" / "checkpoints").glob("step-*/*.safetensors"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    names = ("config.yaml", "metrics.jsonl", "environment.json")
    before = [(tmp_path / "run" / name).read_bytes() for name in names]
    assert train("optimizer.lr=0.5", "checkpoint.allow_changes=true", small=False)[0] == 1
    assert [(tmp_path / "run" / name).read_bytes() for name in names] == before
    data.write_bytes(whole)
    assert train(small=False)[0] == 0
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]
