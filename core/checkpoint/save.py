"""Saves a run's state: written aside, made durable, renamed; the checkpoint before stays until then."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.checkpoint.layout import CheckpointError, complete_checkpoints
from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.files import Files

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from gridtron.core.grid import Grid


def save(
    path: Path,
    state: Mapping[str, ShardedTensorView],
    extra: Mapping[str, Any],
    grid: Grid,
    copies: int = 1,
    files: Files | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Writes ``state`` and ``extra`` as the checkpoint ``path``; every rank of ``grid`` calls it.

    Args:
        path: folder of the checkpoint, as :func:`gridtron.core.checkpoint.layout.step_path` names it.
        state: this rank's part of every tensor it holds, under grid-independent names.
        extra: JSON values, the same on every rank.
        grid: of the run; a grid without torch.distributed saves alone.
        copies: how many of the ranks that hold the same rows write them, where there are so many: what is damaged in
            one file can be put back from another.
        files: the disk; default the real one.
        group: over all ranks of the grid, on which they agree; default torch.distributed's own.

    Raises:
        CheckpointError: on every rank alike, where one of them could not write; nothing half-written is left, and the
            checkpoints before are as they were.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from gridtron.core.checkpoint.planning import SavePlanner, copied_parts, entries
    from gridtron.core.checkpoint.storage import Writer

    writer = Writer(path, grid.rank, dict(extra), copied_parts(state, copies), files or Files())
    try:
        # DCP warns wherever there is one process. For good: what restores the filters is not safe in a thread.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            entries(state, writing=True),
            storage_writer=writer,
            planner=SavePlanner(),
            process_group=group,
            no_dist=grid.mesh is None,
        )
    except CheckpointException as failure:
        if grid.rank == 0:
            writer.discard()
        raise _explained(failure, path) from None


def _explained(failure: Any, path: Path) -> Exception:
    """What ranks report together, as the one error that all of them raise."""
    rank, (error, _) = min(failure.failures.items())
    if isinstance(error, CheckpointError):
        return CheckpointError(str(error), agreed=True)
    if isinstance(error, OSError):
        kept = complete_checkpoints(path.parent)
        reason = os.strerror(error.errno) if error.errno else str(error)
        return CheckpointError(
            f"rank {rank} could not write the checkpoint {path.name}: {reason} ({error.filename or path.parent}).\n"
            + (f"The checkpoint before, {kept[-1].name}, is intact. " if kept else "There is no checkpoint before it. ")
            + "Make room or choose another run.directory, and start the same command again to go on.",
            agreed=True,
        )
    return RuntimeError(f"saving {path} failed\n{failure}")
