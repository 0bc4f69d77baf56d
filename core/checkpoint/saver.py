"""Saves while the run goes on: a copy is taken at once, and written by a thread of its own, one at a time."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.checkpoint.retention import Retention, prune
from gridtron.core.checkpoint.save import save
from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.files import Files

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from gridtron.core.grid import Grid


class Saver:
    """Writes checkpoints of a run, at most one at a time; every rank of the grid has one and calls it alike.

    Args:
        grid: of the run.
        asynchronous: :meth:`save` returns when the state is copied, in pinned memory where it lies on a device; a
            thread writes the copy, and agrees with the other ranks' over a process group of its own.
        copies: see :func:`gridtron.core.checkpoint.save.save`.
        retention: which older checkpoints go when a newer one is complete; default none.
        files: the disk; default the real one.
    """

    def __init__(
        self,
        grid: Grid,
        asynchronous: bool = False,
        copies: int = 1,
        retention: Retention | None = None,
        files: Files | None = None,
    ):
        self.grid = grid
        self.asynchronous = asynchronous
        self.copies = copies
        self.retention = retention or Retention()
        self.files = files or Files()
        self._staged: dict[str, Tensor] = {}
        self._metrics: dict[int, float] = {}
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def save(self, path: Path, state: Mapping[str, ShardedTensorView], extra: Mapping[str, Any]) -> None:
        """Writes the checkpoint ``path``, or begins to; waits for the one before.

        Raises:
            CheckpointError: on every rank alike, of this save, or of the one before where it went on behind.
        """
        self.wait()
        if not self.asynchronous:
            self._write(path, state, extra)
            return
        group = self.grid.everyone("saving").group
        staged = self._stage(state)
        # The values as they are now: callbacks go on changing theirs.
        fixed = json.loads(json.dumps(dict(extra)))

        def write() -> None:
            try:
                self._write(path, staged, fixed, group)
            except BaseException as fault:  # told by wait()
                self._fault = fault

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(
        self,
        path: Path,
        state: Mapping[str, ShardedTensorView],
        extra: Mapping[str, Any],
        group: ProcessGroup | None = None,
    ) -> None:
        save(path, state, extra, self.grid, self.copies, self.files, group)
        if self.grid.rank == 0:
            try:
                prune(path.parent, self.retention, self.files, self._metrics)
            except OSError as error:
                # The new checkpoint is complete: what could not be deleted is tried again with the next.
                warnings.warn(f"older checkpoints could not be deleted: {error}", stacklevel=2)

    @property
    def busy(self) -> bool:
        """Whether a save was begun and not waited for."""
        return self._thread is not None

    @property
    def finished(self) -> bool:
        """Whether this rank's part of the save behind the run is over; true where there is none."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is complete on the disk, by all ranks.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def abandon(self, timeout: float) -> None:
        """Gives a save that goes on behind a failed run so many seconds; what becomes of it is not told."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _stage(self, state: Mapping[str, ShardedTensorView]) -> dict[str, ShardedTensorView]:
        """The state with copies of what this rank writes; the memory of the save before is used again."""
        import torch

        staged = {}
        devices = set()
        for name, view in state.items():
            if view.replica >= self.copies:
                staged[name] = view
                continue
            local = view.local.detach()
            kept = self._staged.get(name)
            if kept is None or kept.shape != local.shape or kept.dtype != local.dtype:
                kept = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda, requires_grad=False)
                self._staged[name] = kept
            kept.copy_(local, non_blocking=local.is_cuda)
            if local.is_cuda:
                devices.add(local.device)
            staged[name] = replace(view, local=kept)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return staged
