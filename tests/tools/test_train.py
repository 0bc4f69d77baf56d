"""``gridtron train`` around a model of seven numbers: starts, folders, resuming, failures, outer launchers."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import toy_run
import yaml

from gridtron.core.training.metrics import read_rows
from gridtron.tools.run_directory import RunLock, changed_mathematics, requested_directory, source_commit
from gridtron.tools.train import main

TOY = str(Path(toy_run.__file__).resolve())
SMALL = (
    "train.steps=6",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.sequence_length=4",
    "logging.tensorboard=false",
)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The toy in place of the assembled run, an empty working directory, no launcher, one thread."""
    monkeypatch.setitem(sys.modules, "gridtron.tools.assemble", toy_run.module())
    # Preparing the standard library's source is another part's.
    monkeypatch.setattr("gridtron.tools.arguments.check_data", lambda plan: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def train(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command into ``tmp_path/run``; returns its exit code and what it said."""

    def run(*overrides: str, small: bool = True, directory: str | None = None) -> tuple[int, str]:
        folder = directory or str(tmp_path / "run")
        code = main([*(SMALL if small else ()), f"run.directory={folder}", *overrides])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return run


def rows(tmp_path: Path, name: str = "run") -> list[dict[str, Any]]:
    return [row for row in read_rows(tmp_path / name / "metrics.jsonl") if "grad_norm" in row]


def losses(tmp_path: Path, name: str = "run") -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(tmp_path, name)]


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


@pytest.mark.parametrize(
    "first", [("grid.tensor=2",), ("grid.data=2", "train.micro_batch_size=1"), ("grid.tensor=3",)], ids=str
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
    data.write_bytes(data.read_bytes()[:-8])
    code, printed = train(small=False)
    assert code == 1
    assert "bytes and should have" in printed
    assert "Traceback" not in printed


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


# -------------------------------------------------------------------- failing ranks
@pytest.mark.case(15)
@pytest.mark.parametrize("where", ["step:1:2", "data:1:3", "save:1:6", "assemble:1:0"])
@pytest.mark.parametrize("processes", [2, 4])
def test_the_first_traceback_with_its_place(
    where: str, processes: int, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_FAULT", where)
    began = time.monotonic()
    code, printed = train(f"grid.data={processes}", "train.micro_batch_size=1")
    assert code == 1
    assert time.monotonic() - began < 30
    assert f"rank 1 of {processes} (data 1) failed:\nTraceback" in printed
    assert printed.count("Traceback (most recent call last)") == 1
    assert f"KeyError: 'planted in {where.split(':')[0]}'" in printed


@pytest.mark.parametrize(("how", "message", "code"), [("kill", "ended by SIGKILL", 1), ("exit", "exit code 5", 5)])
def test_a_rank_that_vanishes(how: str, message: str, code: int, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAULT", f"step:1:2:{how}")
    found, printed = train("grid.data=2")
    assert found == code
    assert "rank 1 of 2 (data 1)" in printed
    assert message in printed


@pytest.mark.case(15)
def test_a_wrong_configuration_ends_before_any_process(train: Any, tmp_path: Path) -> None:
    code, printed = train("grid.data=3")
    assert code == 2
    assert "global_batch_size=4" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("width", "named"), [("3000", "the checkpoint step-00000010"), ("7", "metrics.jsonl")])
def test_a_full_disk_ends_in_a_message_and_the_run_goes_on(
    width: str, named: str, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may grow over 6,000 bytes: a wide model's checkpoint reaches that, or the rows of many steps."""
    monkeypatch.setenv("TOY_WIDTH", width)
    common = ("grid.tensor=2", "train.steps=40", "checkpoint.every=10")
    assert train(*common, "train.stop_after=2")[0] == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        code, printed = train(*common)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    for expected in (named, "File too large", "Make room"):
        assert expected in printed
    assert "Traceback" not in printed
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before
    assert not list(checkpoint.parent.glob(".*"))
    code, printed = train(*common)
    assert code == 0, printed
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 41))


# -------------------------------------------------------------------- as a command of its own
def start(tmp_path: Path, *overrides: str, prefix: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    command = [*(prefix or (sys.executable,)), TOY, *SMALL, f"run.directory={tmp_path / 'run'}", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def wait_for_steps(tmp_path: Path, count: int, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while len(rows(tmp_path)) < count:
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)


def test_ctrl_c_leaves_no_process_and_a_run_that_goes_on(tmp_path: Path, train: Any) -> None:
    job = start(tmp_path, "grid.tensor=2", "train.steps=500", "checkpoint.every=2", TOY_DELAY="0.05")
    wait_for_steps(tmp_path, 4, job)
    ranks = psutil.Process(job.pid).children(recursive=True)
    assert len(ranks) >= 2
    os.killpg(job.pid, signal.SIGINT)
    _, printed = job.communicate(timeout=20)
    assert job.returncode == 130
    assert printed.splitlines()[-1] == "interrupted"
    assert "Traceback" not in printed
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    done = len(rows(tmp_path))
    code, printed = train("train.stop_after=30", small=False)
    assert code == 0, printed
    assert "goes on from" in printed
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 31))
    assert done < 30


def torchrun(processes: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")


@pytest.mark.case(16)
def test_ranks_that_start_apart_share_one_folder(train: Any, tmp_path: Path) -> None:
    command = [*torchrun(2), TOY, *SMALL, "grid.tensor=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOY_LATE": "1.2"}
    job = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=100)
    assert job.returncode == 0, job.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(read_rows(folder / "metrics.jsonl")) == 6
    names = sorted(path.name for path in (folder / "checkpoints" / "step-00000006").iterdir())
    assert names == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    # And it is found whole again, by one process.
    code, printed = train(
        "train.steps=7", "checkpoint.allow_changes=true", "grid.tensor=1", small=False, directory=str(folder)
    )
    assert code == 0, printed
    assert len(read_rows(folder / "metrics.jsonl")) == 7


def start_ranks(
    tmp_path: Path, count: int, port: int, *overrides: str, **variables: str
) -> list[subprocess.Popen[str]]:
    """Ranks as srun starts them: all at once, nobody watches."""
    shared = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        start(tmp_path, *overrides, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **shared, **variables)
        for rank in range(count)
    ]


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.case(16)
def test_a_refusal_ends_every_rank_and_is_said_once(tmp_path: Path) -> None:
    jobs = start_ranks(tmp_path, 2, free_port(), "grid.tensor=2", "optimizer.lr=-1")
    printed = [job.communicate(timeout=60) for job in jobs]
    assert [job.returncode for job in jobs] == [2, 2]
    assert printed[0][1].count("optimizer.lr=-1") == 1
    assert printed[1] == ("", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.case(15)
def test_a_failing_rank_of_an_outer_launcher_does_not_wait_for_its_peers(tmp_path: Path) -> None:
    began = time.monotonic()
    jobs = start_ranks(tmp_path, 2, free_port(), "grid.data=2", TOY_FAULT="step:1:2")
    printed = [job.communicate(timeout=60) for job in jobs]
    assert time.monotonic() - began < 30
    assert [job.returncode for job in jobs] == [1, 1]
    assert printed[1][1].startswith("rank 1 of 2 (data 1) failed:\nTraceback")
    assert "KeyError: 'planted in step'" in printed[1][1]


def test_incomplete_variables_of_a_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main([*SMALL]) == 2
    assert "WORLD_SIZE is not set" in capfd.readouterr().err
