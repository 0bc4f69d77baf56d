"""Loads a checkpoint of any grid onto any grid, in place; nothing in it is executed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.core.checkpoint.tensors import ShardedTensorView

if TYPE_CHECKING:
    from gridtron.core.grid import Grid


def load(path: Path, state: Mapping[str, ShardedTensorView], grid: Grid) -> dict[str, Any]:
    """Fills the tensors of ``state`` from the checkpoint ``path``; every rank of ``grid`` calls it.

    Args:
        path: folder of one complete checkpoint.
        state: this rank's part of every tensor it holds; together the ranks must ask for every name in the checkpoint.
        grid: of the run, of whatever sizes.

    Returns:
        The ``extra`` that was saved with it.

    Raises:
        CheckpointError: a damaged or foreign file; names that are missing or left over, and shapes that differ, all
            listed.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from gridtron.core.checkpoint.planning import LoadPlanner, entries
    from gridtron.core.checkpoint.storage import Reader

    manifest = Manifest.read(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                entries(state, writing=False),
                storage_reader=Reader(path, manifest),
                planner=LoadPlanner(manifest, str(path)),
                no_dist=grid.mesh is None,
            )
    except CheckpointException as failure:
        _, (error, _) = min(failure.failures.items())
        if isinstance(error, CheckpointError):
            raise CheckpointError(str(error), agreed=True) from None
        raise RuntimeError(f"loading {path} failed\n{failure}") from None
    return dict(manifest.extra)
