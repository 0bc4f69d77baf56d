"""A pool of worker processes for tests of several ranks: started once a test run, one thread each, gloo by a file.

``run_ranks(function, world_size, *arguments)`` calls ``function(*arguments)`` on ranks 0 to world_size - 1 with
torch.distributed running, and returns their results in rank order. A failing rank fails the test with its traceback;
after a failure or at the time limit the pool ends its own workers and starts anew, because a failed gloo operation
poisons its group.
"""

from __future__ import annotations

import atexit
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


class RankError(AssertionError):
    """A rank raised, ended or did not come back in time."""


def _load(path: str, name: str) -> Callable[..., Any]:
    key = f"_ranks_{abs(hash(path))}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None and spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return getattr(sys.modules[key], name)


def _work(connection: Connection, search_path: list[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:] = search_path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        path, name, arguments, rank, world_size, rendezvous = task
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=20),
            )
            result = _load(path, name)(*arguments)
            dist.barrier()
            dist.destroy_process_group()
            connection.send((True, result))
        except BaseException:
            connection.send((False, f"rank {rank} of {world_size}:\n{traceback.format_exc()}"))


class _Pool:
    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch.distributed", "gridtron.parallel"])
        self.workers: list[tuple[Any, Connection]] = []
        self.folder = tempfile.TemporaryDirectory(prefix="gridtron-ranks-")
        self.count = 0

    def grow(self, size: int) -> None:
        while len(self.workers) < size:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_work, args=(theirs, list(sys.path)), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def stop(self) -> None:
        for process, connection in self.workers:
            connection.close()
            process.kill()
        for process, _ in self.workers:
            process.join()
        self.workers = []

    def run(self, path: str, name: str, arguments: tuple[Any, ...], world_size: int, timeout: float) -> list[Any]:
        self.grow(world_size)
        self.count += 1
        rendezvous = f"{self.folder.name}/{self.count}"
        for rank, (_, connection) in enumerate(self.workers[:world_size]):
            connection.send((path, name, arguments, rank, world_size, rendezvous))
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        by_connection = {connection: rank for rank, (_, connection) in enumerate(self.workers[:world_size])}
        while len(results) + len(failures) < world_size:
            # Once a rank has failed the others can only wait for it: they get a moment to report, no more.
            limit = min(deadline, time.monotonic() + 1) if failures else deadline
            ready = wait(list(by_connection), max(0, limit - time.monotonic()))
            if not ready:
                waiting = list(by_connection.values())
                failures.append(f"ranks {waiting} did not come back within {timeout:.0f} s" if not failures else "")
                break
            for connection in ready:
                rank = by_connection.pop(connection)  # type: ignore[call-overload]
                try:
                    done, value = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    done, value = False, f"rank {rank} ended without a word"
                if done:
                    results[rank] = value
                else:
                    failures.append(value)
        if failures:
            self.stop()
            raise RankError("\n\n".join(failure for failure in failures if failure))
        return [results[rank] for rank in range(world_size)]


_POOLS: list[_Pool] = []


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 60) -> list[Any]:
    """Results of ``function(*arguments)``, one of a module's top level, on each of ``world_size`` ranks."""
    if not _POOLS:
        _POOLS.append(_Pool())
        atexit.register(_POOLS[0].stop)
    path = str(Path(sys.modules[function.__module__].__file__ or "").resolve())
    return _POOLS[0].run(path, function.__name__, arguments, world_size, timeout)
