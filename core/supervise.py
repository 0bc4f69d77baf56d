"""Processes of one machine, started and watched without an outer launcher.

``torch.multiprocessing.start_processes`` is not used: its children die with their parent by SIGINT, which Python
holds back while a rank waits inside a collective; it reports whichever failed rank it sees first and not the one that
failed first; and it waits up to 30 s between SIGTERM and SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from gridtron.core.errors import JobError
from gridtron.core.launch import Launcher, threads_each

_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""
_LONGEST_REPORT = 48 * 1024
"""Bytes: a report must fit into a pipe's buffer (64 KiB on Linux), which is read only when the rank is gone."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class _Report:
    """How a rank failed, in its own words; ``returned``: an exit code that its function gave, as every rank's does."""

    moment: float
    message: str
    expected: bool
    agreed: bool
    returned: int = 0


def run_local(
    function: Callable[..., int | None],
    processes: int,
    arguments: Sequence[Any] = (),
    describe: Callable[[int], str] | None = None,
    threads: int | None = None,
    method: str | None = None,
    handed_on: Sequence[signal.Signals] = (),
) -> int:
    """Runs ``function(launcher, *arguments)`` in ``processes`` processes of this machine and waits for all of them.

    The first failure ends the others (SIGTERM, three seconds later SIGKILL) and is printed once, on standard error,
    with its rank. Ctrl-C, SIGTERM and SIGHUP end all; so does the death of this process, by whatever signal.

    Args:
        function: returns an exit code, or None for 0. A :class:`JobError` is printed as its message, any other
            exception as its traceback.
        processes: the number of ranks.
        arguments: handed on; picklable under "spawn".
        describe: names a rank's place on the grid, as in "data 0, tensor 1".
        threads: of each rank; default the cores of this process divided by ``processes``.
        handed_on: signals that the ranks themselves answer: the first one that comes is sent on to all of them, which
            are then waited for; a second SIGTERM ends them.
        method: "fork" or "spawn"; default fork on Linux without CUDA, where this process may import torch but must
            have run no parallel operation of it; else spawn.

    Returns:
        0; the first failing rank's code (1 for an exception); or 128 plus the number of the signal that ended the job,
        with which the caller should exit: SIGINT then stays ignored.
    """
    if method is None:
        method = _start_method()
    if threads is None:
        threads = threads_each(processes)
    folder = tempfile.mkdtemp(prefix="gridtron-")
    try:
        with _Interruption(handed_on) as interruption:
            started = _start(
                function, processes, arguments, threads, method, f"file://{folder}/rendezvous", interruption
            )
            try:
                return _supervise(started, interruption, describe)
            finally:
                # What ranks answer to does not end them.
                _end(started, interruption, signal.SIGHUP if handed_on else signal.SIGTERM)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_method() -> str:
    import torch

    # A forked child of a process that has touched CUDA cannot use CUDA; macOS's frameworks do not survive a fork.
    safe = sys.platform == "linux" and not torch.cuda.is_available() and threading.active_count() == 1
    return "fork" if safe else "spawn"


class _Interruption:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered, in place of what they would do; signals that are
    ``handed_on`` wait in a list first."""

    def __init__(self, handed_on: Sequence[signal.Signals] = ()) -> None:
        self.first: int | None = None
        self.count = 0
        self.waiting: list[int] = []
        self._handed_on = set(handed_on)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in {*_ENDING, *self._handed_on}}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._handed_on:
            self._handed_on.discard(signal.Signals(number))
            self.waiting.append(number)
            return
        if number not in _ENDING:
            return
        self.first = self.first or number
        self.count += 1

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            # The caller of an interrupted job is about to exit: a late second Ctrl-C would only break that exit.
            interrupted = self.first is not None and number == signal.SIGINT
            signal.signal(number, signal.SIG_IGN if interrupted else handler)


@dataclass(frozen=True)
class _Rank:
    rank: int
    process: BaseProcess
    reports: Connection

    def report(self) -> _Report | None:
        with contextlib.suppress(EOFError, OSError, ValueError):
            if self.reports.poll():
                return _Report(**json.loads(self.reports.recv_bytes()))
        return None


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Between a fork and the child's own handlers a signal would go to the parent's, and be lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    function: Callable[..., int | None],
    processes: int,
    arguments: Sequence[Any],
    threads: int,
    method: str,
    init_method: str,
    interruption: _Interruption,
) -> list[_Rank]:
    context: Any = multiprocessing.get_context(method)
    alive_end, held_end = context.Pipe(duplex=False)
    started: list[_Rank] = []
    try:
        for rank in range(processes):
            launcher = Launcher("local", rank, processes, rank, processes, init_method if processes > 1 else None)
            reports, own_end = context.Pipe(duplex=False)
            # A forked child holds a copy of the end whose closing tells of the parent's death, and must close it.
            inherited = held_end if method == "fork" else None
            child = context.Process(
                target=_run_rank,
                args=(function, launcher, arguments, threads, own_end, alive_end, inherited, os.getpid()),
                name=f"rank {rank}",
            )
            with _signals_held():
                child.start()
            own_end.close()
            started.append(_Rank(rank, child, reports))
    except BaseException:
        _end(started, interruption)
        raise
    alive_end.close()
    # Held by this process alone until it ends; the reference lives as long as the list of ranks does.
    started[0].process.held_end = held_end  # type: ignore[attr-defined]
    return started


def _supervise(started: Sequence[_Rank], interruption: _Interruption, describe: Callable[[int], str] | None) -> int:
    running = {member.process.sentinel: member for member in started}
    returned = 0
    while running:
        ready = wait(list(running), timeout=0.1)
        if interruption.first is not None:
            name = signal.Signals(interruption.first).name
            _say("interrupted" if interruption.first == signal.SIGINT else f"ended by {name}")
            return 128 + interruption.first
        while interruption.waiting:
            _hand_on(interruption.waiting.pop(0), running.values())
        ended = [running.pop(sentinel) for sentinel in ready]  # type: ignore[arg-type]
        for member in ended:
            member.process.join()
        failed = [(member, member.report()) for member in ended if member.process.exitcode]
        # A code that a rank's function gave is no failure: the others come to their end too.
        returned = returned or next((report.returned for _, report in failed if report and report.returned), 0)
        failed = [(member, report) for member, report in failed if not (report and report.returned)]
        if failed:
            return _explain(failed, started, describe)
    return returned


def _hand_on(number: int, members: Iterable[_Rank]) -> None:
    for member in members:
        if member.process.pid is not None and member.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.process.pid, number)


def _explain(
    failed: Sequence[tuple[_Rank, _Report | None]], started: Sequence[_Rank], describe: Callable[[int], str] | None
) -> int:
    """Prints the first failure and returns its exit code.

    A rank that vanished breaks its neighbours' connections, so it comes before any report; among reports the earliest
    counts. SIGABRT comes last: the communication library aborts so when a neighbour is gone.
    """
    vanished, told = [], []
    for member, report in failed:
        told.append((report, member)) if report else vanished.append(member)
    for member in started:
        # A rank that failed first may still be on its way out while one that failed because of it is gone.
        known = any(member is other for other, _ in failed)
        if told and not known and (report := member.report()) and not report.returned:
            told.append((report, member))
    sudden = [member for member in vanished if member.process.exitcode != -signal.SIGABRT]
    if told and not sudden:
        report, member = min(told, key=lambda item: item[0].moment)
        where = _where(member.rank, len(started), describe)
        if report.agreed:
            if report.message:
                _say(report.message)
        elif report.expected:
            _say(f"{where}: {report.message}")
        else:
            _say(f"{where} failed:\n{report.message}")
        return member.process.exitcode or 1
    member = (sudden or vanished)[0]
    code = member.process.exitcode or 1
    where = _where(member.rank, len(started), describe)
    if code < 0:
        hint = "; out of memory? The kernel's log (dmesg) tells" if code == -signal.SIGKILL else ""
        _say(f"{where} was ended by {signal.Signals(-code).name}{hint}")
        return 1
    _say(f"{where} ended with exit code {code} and without a traceback")
    return code


def _end(started: Sequence[_Rank], interruption: _Interruption, first: signal.Signals = signal.SIGTERM) -> None:
    """Leaves no process: ``first``, then SIGKILL after a while, or at once on a second Ctrl-C."""
    _hand_on(first, started)
    deadline, asked = time.monotonic() + _GRACE, interruption.count
    while any(member.process.is_alive() for member in started):
        if time.monotonic() > deadline or interruption.count > asked:
            for member in started:
                member.process.kill()
            break
        wait([member.process.sentinel for member in started if member.process.is_alive()], timeout=0.05)
    for member in started:
        member.process.join(_GRACE)
        member.reports.close()


# -------------------------------------------------------------------- in the rank's own process
def _run_rank(
    function: Callable[..., int | None],
    launcher: Launcher,
    arguments: Sequence[Any],
    threads: int,
    reports: Connection,
    alive: Connection,
    inherited: Connection | None,
    parent: int,
) -> None:
    # Ctrl-C reaches every process of the terminal; the parent alone decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    if inherited is not None:
        inherited.close()
    _die_with_parent(parent, alive)
    import torch

    torch.set_num_threads(threads)
    report = None
    try:
        code = function(launcher, *arguments) or 0
        if code:
            report = _Report(time.monotonic(), "", expected=True, agreed=True, returned=code)
    except BaseException as error:
        report = _Report(time.monotonic(), *failure_message(error))
        code = 1
    # Told before anything is cleaned up: ending the process group would wait for peers that wait in a collective.
    if report is not None:
        with contextlib.suppress(OSError):
            reports.send_bytes(json.dumps(report.__dict__).encode())
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def failure_message(error: BaseException) -> tuple[str, bool, bool]:
    """What to print for ``error``; whether it is a message for the user (no traceback); whether all ranks say it."""
    if isinstance(error, JobError):
        return str(error), True, error.agreed
    text = "".join(traceback.format_exception(error))
    if len(text) > _LONGEST_REPORT // 4:
        half = _LONGEST_REPORT // 8
        text = text[:half] + "\n  [...]\n" + text[-half:]
    return text.rstrip(), False, False


def run_ranked(
    function: Callable[..., int | None], launcher: Launcher, arguments: Sequence[Any], describe: Callable[[int], str]
) -> int:
    """Runs ``function(launcher, *arguments)`` here, as one of the processes that an outer launcher started.

    A failure is printed with its rank and place; the process then ends at once, without waiting for peers that may
    wait for it in a collective. Returns the exit code otherwise.
    """
    try:
        return function(launcher, *arguments) or 0
    except KeyboardInterrupt:
        if launcher.rank == 0:
            _say("interrupted")
        code = 130
    except Exception as error:
        message, expected, agreed = failure_message(error)
        where = _where(launcher.rank, launcher.world_size, describe) if launcher.world_size > 1 else ""
        if expected:
            if launcher.rank == 0 or not agreed:
                _say(f"{where}: {message}" if where and not agreed else message)
        else:
            _say(f"{where} failed:\n{message}" if where else message)
        code = 1
    if launcher.world_size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def end_with_parent(number: signal.Signals) -> None:
    """This process gets the signal when its parent ends, however it ends; on Linux, and nothing elsewhere."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, int(number), 0, 0, 0)


def _die_with_parent(parent: int, alive: Connection) -> None:
    """SIGKILL from the kernel when the parent ends, where there is one that does that; and a thread that watches."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        with contextlib.suppress(OSError, EOFError):
            alive.poll(None)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _where(rank: int, processes: int, describe: Callable[[int], str] | None) -> str:
    place = f" ({describe(rank)})" if describe is not None else ""
    return f"rank {rank} of {processes}{place}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
