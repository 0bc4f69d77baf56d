"""``gridtron train``: one process composes and decides, every rank trains.

Without a launcher this process composes the plan and starts the ranks. Under torchrun, srun or mpirun rank 0 composes
and hands plan, folder or refusal to the others through the job's own rendezvous: what a rank composed by itself could
differ from its neighbours' (a time stamp, a file that changed in between).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from gridtron.conf.refusal import Refusal
from gridtron.conf.rules import needed_processes
from gridtron.conf.schema import Plan, plan_from_dict
from gridtron.conf.warm_start import source_violations
from gridtron.core.errors import JobError
from gridtron.core.launch import Launcher, find_launcher, threads_each
from gridtron.core.layout import AXIS_NAMES, GridSizes, resolve_sizes
from gridtron.core.supervise import run_local, run_ranked
from gridtron.core.training.interruption import ASKED_BY
from gridtron.tools.arguments import compose_or_exit_code, parse_arguments, print_refusal
from gridtron.tools.run_directory import (
    Decision,
    RunLock,
    decide,
    new_directory,
    open_run,
    requested_directory,
    stored_plan,
)
from gridtron.tools.train_rank import run_rank

_HANDING_TIMEOUT = 600.0
"""Seconds that a rank waits for rank 0's decision: preparing a large text on first use takes minutes."""


def main(arguments: Sequence[str]) -> int:
    """Runs one training command, on all ranks. Returns the exit code."""
    try:
        launcher = find_launcher(os.environ)
    except ValueError as error:
        return print_refusal(Refusal([str(error)]))
    try:
        if launcher.name == "none":
            return _start_here(arguments)
        return _join(arguments, launcher)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


# -------------------------------------------------------------------- deciding
def make_decision(arguments: Sequence[str], launched: int | None) -> tuple[Decision, RunLock] | int:
    """Composes, chooses the run's folder and takes it; or an exit code, when all is said."""
    with contextlib.ExitStack() as undo:
        try:
            decided = _decide(arguments, launched, undo)
        except Refusal as refusal:
            return print_refusal(refusal)
        except OSError as error:
            return print_refusal(
                Refusal([f"{error.filename or 'the run'}: {error.strerror}; choose another run.directory"])
            )
        except JobError as error:
            return print_refusal(Refusal([str(error)]))
        if isinstance(decided, int):
            return decided
        undo.pop_all()
        return decided


def _decide(
    arguments: Sequence[str], launched: int | None, undo: contextlib.ExitStack
) -> tuple[Decision, RunLock] | int:
    parsed = parse_arguments(arguments)
    directory = requested_directory(parsed.overrides)
    if parsed.help or parsed.show:
        composed = compose_or_exit_code(arguments, launched, stored_plan(directory))
        assert isinstance(composed, int)
        return composed
    # Held before it is read: what another job is about to write there must not be half seen.
    lock = _taken(directory, undo) if directory is not None and directory.is_dir() else None
    stored = stored_plan(directory)
    plan = compose_or_exit_code(arguments, launched, stored)
    if isinstance(plan, Plan) and directory is None and plan.run.directory:
        # An option file names the folder.
        directory = Path(plan.run.directory).expanduser().absolute()
        stored = stored_plan(directory)
        if stored is not None:
            plan = compose_or_exit_code(arguments, launched, stored)
    if isinstance(plan, int):
        return plan
    if lock is None:
        made = directory is None or not directory.exists()
        directory = new_directory(plan) if directory is None else directory
        directory.mkdir(parents=True, exist_ok=True)
        if made:
            undo.callback(_remove_empty, directory)
        lock = _taken(directory, undo)
    assert directory is not None
    decision = decide(plan, stored, parsed.overrides, directory)
    if isinstance(decision, str):
        print(decision)
        return 0
    if decision.checkpoint is None and stored is not None and (faults := source_violations(plan)):
        raise Refusal([fault.message for fault in faults])  # as composing says of a run that begins
    # A run that goes on is rewritten only once its checkpoint is loaded (run_rank): a start that fails changes nothing.
    return (decision if decision.checkpoint else open_run(decision)), lock


def _taken(directory: Path, undo: contextlib.ExitStack) -> RunLock:
    lock = RunLock(directory)
    undo.callback(lock.release)
    return lock


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _start_here(arguments: Sequence[str]) -> int:
    decided = make_decision(arguments, None)
    if isinstance(decided, int):
        return decided
    decision, lock = decided
    plan = plan_from_dict(decision.plan)
    processes = needed_processes(plan)
    try:
        if processes == 1:
            return run_ranked(run_rank, Launcher(), (decision,), lambda rank: "")
        describe = describe_ranks(plan, processes)
        return run_local(run_rank, processes, (decision,), describe, _threads_asked(), handed_on=ASKED_BY)
    finally:
        lock.release()


def _threads_asked() -> int | None:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None


def _join(arguments: Sequence[str], launcher: Launcher) -> int:
    """One of the processes that an outer launcher started."""
    if launcher.local_world_size > 1 and _threads_asked() is None:
        import torch

        torch.set_num_threads(threads_each(launcher.local_world_size))
    lock: RunLock | None = None

    def make() -> Decision | int:
        nonlocal lock
        decided = make_decision(arguments, launcher.world_size)
        if isinstance(decided, int):
            return decided
        decision, lock = decided
        return decision

    if launcher.init_method is None:
        decision, store = make(), None
    else:
        decision, store = hand_over(launcher, make)
    if isinstance(decision, int):
        return decision
    try:
        describe = describe_ranks(plan_from_dict(decision.plan), launcher.world_size)
        return run_ranked(run_rank, launcher, (decision,), describe)
    finally:
        # Rank 0 may be the rendezvous of the others: it lives as long as the job.
        del store
        if lock is not None:
            lock.release()


def hand_over(
    launcher: Launcher, make: Callable[[], Decision | int], timeout: float = _HANDING_TIMEOUT
) -> tuple[Any, Any]:
    """Rank 0's decision, on every rank, before there is a process group; and the store that carried it.

    Args:
        launcher: with the job's rendezvous.
        make: called on rank 0 alone; an exit code ends every rank.
        timeout: seconds to wait for another rank.
    """
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    assert launcher.init_method is not None
    store, _, _ = next(
        rendezvous(launcher.init_method, launcher.rank, launcher.world_size, timeout=timedelta(seconds=timeout))
    )
    shared = PrefixStore("gridtron/decision", store)
    if launcher.rank != 0:
        told = json.loads(shared.get("decision"))
        shared.add("read", 1)
        return (told["exit"] if "exit" in told else Decision.from_json(told["decision"])), store
    try:
        decision = make()
    except BaseException:
        shared.set("decision", json.dumps({"exit": 1}))
        _wait_until_read(shared, launcher.world_size - 1, 5)
        raise
    told = {"exit": decision} if isinstance(decision, int) else {"decision": decision.to_json()}
    shared.set("decision", json.dumps(told))
    if isinstance(decision, int):
        _wait_until_read(shared, launcher.world_size - 1, min(timeout, 60))
    return decision, store


def _wait_until_read(shared: Any, readers: int, timeout: float) -> None:
    """This process may hold the store: it stays until the others, which may start later, have read."""
    deadline = time.monotonic() + timeout
    while shared.add("read", 0) < readers and time.monotonic() < deadline:
        time.sleep(0.05)


def describe_ranks(plan: Plan, world_size: int) -> Callable[[int], str]:
    """Names a rank's place on the axes that are longer than 1, as in "data 0, tensor 1"."""
    sizes: GridSizes = resolve_sizes(world_size, plan.grid.order, **_axes(plan))

    def describe(rank: int) -> str:
        place = sizes.coordinate(rank)
        return ", ".join(f"{name} {place[name]}" for name in sizes.order if sizes.sizes[name] > 1) or "alone"

    return describe


def _axes(plan: Plan) -> dict[str, int]:
    return {name: getattr(plan.grid, name) for name in AXIS_NAMES}
