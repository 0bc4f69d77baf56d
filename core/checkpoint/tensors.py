"""One rank's part of one named tensor, as a checkpoint sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gridtron.core.pieces import Piece
from gridtron.core.sharding import Sharding

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ShardedTensorView:
    """A local tensor and where its rows lie in the whole.

    Args:
        local: this rank's rows; read when saving, filled in place when loading.
        sharding: global shape and the rows of every rank along the tensor axis.
        axis_rank: this rank's place along the axis of ``sharding``.
        replica: which of the ranks that hold the same rows (of a tensor that is whole on every rank of the axis: of
            all that hold it) this one is; 0 writes them, the next ones where copies are asked for.
        piece: where ``local`` is a flat range of the rows, one-dimensional, which.
    """

    local: Tensor
    sharding: Sharding
    axis_rank: int = 0
    replica: int = 0
    piece: Piece | None = None
