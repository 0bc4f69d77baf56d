"""Loads a checkpoint of any grid onto any grid, in place; nothing in it is executed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.core.checkpoint.tensors import ShardedTensorView

if TYPE_CHECKING:
    from gridtron.core.grid import Grid


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint gave beside the tensors.

    Args:
        extra: the values that were saved with it.
        missing, unexpected: names that it lacks, and names that nobody asked for, where that is allowed.
    """

    extra: dict[str, Any]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Both as lines for a person."""
        from gridtron.core.checkpoint.planning import left_out_names

        return tuple(left_out_names(self.missing, self.unexpected))


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
    return load_part(path, state, grid).extra


def load_part(path: Path, state: Mapping[str, ShardedTensorView], grid: Grid, strict: bool = True) -> Loaded:
    """:func:`load`; not ``strict``: names that only the checkpoint or only the run has are listed and left out."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from gridtron.core.checkpoint.planning import LoadPlanner, entries
    from gridtron.core.checkpoint.storage import Reader

    manifest = Manifest.read(path)
    planner = LoadPlanner(manifest, str(path), strict)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                entries(state, writing=False),
                storage_reader=Reader(path, manifest),
                planner=planner,
                no_dist=grid.mesh is None,
            )
    except CheckpointException as failure:
        _, (error, _) = min(failure.failures.items())
        if isinstance(error, CheckpointError):
            raise CheckpointError(str(error), agreed=True) from None
        raise RuntimeError(f"loading {path} failed\n{failure}") from None
    return Loaded(dict(manifest.extra), planner.missing, planner.unexpected)
