"""``gridtron train -m``: Hydra's sweeper and launcher over jobs, each in a clean process of its own.

A job's process group, devices, threads and environment end with its process, so that no job sees another's; a job that
fails, or is refused, does not keep the others from running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from gridtron.conf.compose import Request, check_request
from gridtron.conf.overrides import quote_path, quote_text
from gridtron.conf.refusal import Refusal
from gridtron.conf.schema import Option, all_options, schemas_of
from gridtron.core.launch import find_launcher
from gridtron.core.supervise import end_with_parent
from gridtron.core.training.interruption import ASKED_BY
from gridtron.tools.arguments import Arguments, print_refusal

_PATIENCE = 40.0
"""Seconds that an interrupted job has to end its ranks."""


class _Stopped(KeyboardInterrupt):
    """A signal asked the sweep to stop; ``code`` is how the job ended that ran."""

    def __init__(self, number: int):
        super().__init__()
        self.number = signal.Signals(number)
        self.code: int | None = None


@dataclass
class JobRecords:
    """What became of the jobs that ran in this process: number -> (overrides, exit code)."""

    finished: dict[int, tuple[list[str], int]] = field(default_factory=dict)


def run_sweep(arguments: Arguments, train: Sequence[str] = (sys.executable, "-m", "gridtron", "train")) -> int:
    """Runs every combination of the values given, each by the command ``train`` followed by its overrides.

    Returns:
        0; 1 if a job failed; 2 if the request is wrong; 130 after Ctrl-C. After SIGTERM or SIGUSR1, which the job that
        runs is given to save and stop by: its exit code (``launch.preempted_exit``), or 128 plus the signal's number.
    """
    try:
        if arguments.show:
            raise Refusal(["--cfg job shows one job; leave out -m, and give one value for each option"])
        if find_launcher(os.environ).name != "none":
            raise Refusal(
                ["-m under a launcher would run the whole sweep on every rank; start it as gridtron train -m ..."]
            )
        request = check_request(arguments.overrides, arguments.directories, sweep=True)
        if request.checked.violations:
            raise Refusal([violation.message for violation in request.checked.violations])
        directory, overrides = _split_directory(arguments.overrides)
    except Refusal as refusal:
        return print_refusal(refusal)
    except ValueError as fault:  # a launcher's variables that do not fit together
        return print_refusal(Refusal([str(fault)]))
    options = all_options(schemas_of(request.files.chosen_parts(overrides, request.registry), request.registry))
    records = JobRecords()
    job = _job(train, arguments.directories, records)
    try:
        with _interruptible():
            _run_hydra(job, request, [_for_hydra(written, options) for written in overrides], directory)
    except _Stopped as stop:
        print(
            f"gridtron: the sweep was stopped by {stop.number.name}; the same command, with "
            f"run.directory={directory}, goes on",
            file=sys.stderr,
        )
        return 128 + stop.number if stop.code is None else stop.code
    except KeyboardInterrupt:
        print("gridtron: the sweep was interrupted", file=sys.stderr)
        return 130
    except SystemExit as ending:  # Hydra has said why
        return 2 if not records.finished and ending.code else _summary(records, failed=bool(ending.code))
    finally:
        (directory / "multirun.yaml").unlink(missing_ok=True)
    return _summary(records)


def _split_directory(overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder of the whole sweep, and the overrides without it."""
    given = [word for word in overrides if word.lstrip("+").startswith("run.directory=")]
    rest = [word for word in overrides if word not in given]
    value = given[-1].partition("=")[2] if given else ""
    if value in ("", "null"):
        return Path("runs", datetime.now().strftime("%Y-%m-%d_%H-%M-%S-sweep")).absolute(), rest
    return Path(value.strip("'\"")).expanduser().absolute(), rest


def _for_hydra(written: str, options: dict[str, Option]) -> str:
    """An override as Hydra's grammar and its strict merging take it; its meaning is checked again by each job."""
    key, _, value = written.partition("=")
    if key.startswith(("hydra", "~")):
        return written
    name = key.lstrip("+")
    prefix = "++" if value.lstrip().startswith("{") or (name not in options and "." in name) else ""
    return prefix + quote_path(f"{name}={value}", options, sweep=True)


def _job(train: Sequence[str], directories: Sequence[str], records: JobRecords) -> Callable[[Any], None]:
    parent, here = os.getpid(), os.getcwd()

    def job(_: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        overrides, number, directory = list(hydra.overrides.task), int(hydra.job.num), hydra.runtime.output_dir
        folders = [word for folder in directories for word in ("--config-dir", folder)]
        command = [*train, *folders, *overrides, f"run.directory={directory}"]
        print(f"gridtron: job {number}: {' '.join(overrides)} -> {directory}", file=sys.stderr, flush=True)
        code = _run_job(command, here)
        if os.getpid() == parent:
            records.finished[number] = (overrides, code)
        elif code:  # under a launcher of Hydra's the parent learns of it by the exception alone
            raise RuntimeError(f"job {number} ({' '.join(overrides)}) ended with exit code {code}")

    return job


def _run_job(command: Sequence[str], folder: str) -> int:
    """Runs one job to its end, or until the sweep is to end: then it ends first. Returns its exit code."""
    process = subprocess.Popen(command, cwd=folder, preexec_fn=partial(end_with_parent, signal.SIGTERM))
    try:
        return process.wait()
    except _Stopped as stop:
        process.send_signal(stop.number)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            _end(process)
            raise
        stop.code = 128 - code if code < 0 else code
        raise
    except KeyboardInterrupt:
        # From a terminal the job has had its Ctrl-C as well.
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    # SIGTERM, since a shell's background jobs ignore SIGINT; twice, since the first one asks a run to save.
    for patience in (0.5, _PATIENCE):
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        except KeyboardInterrupt:
            break
        return
    process.kill()
    process.wait()


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGUSR1 interrupt as Ctrl-C does, so that the job that runs is told."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in ASKED_BY}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_hydra(job: Callable[[Any], None], request: Request, overrides: list[str], directory: Path) -> None:
    """@hydra.main reads the command line of the process: for its time ours is put there."""
    import hydra

    first = request.files.directories
    path = str(first[0]) if first else "pkg://gridtron.conf"
    own = [
        *request.files.search_path_override(),
        f"hydra.sweep.dir={quote_text(str(directory))}",
        "hydra.sweep.subdir=${hydra.job.num}",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]
    before = sys.argv
    sys.argv = ["gridtron", "--multirun", *own, *overrides]
    try:
        with request.files.registered(request.base()) as name:
            hydra.main(version_base="1.3", config_path=path, config_name=name)(job)()
    finally:
        sys.argv = before


def _summary(records: JobRecords, failed: bool = False) -> int:
    for number, (overrides, code) in sorted(records.finished.items()):
        state = "done" if code == 0 else f"failed with exit code {code}"
        print(f"gridtron: job {number}: {state}: {' '.join(overrides)}", file=sys.stderr)
    return int(failed or any(code for _, code in records.finished.values()))
