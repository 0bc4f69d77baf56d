"""What ranks must decide alike, and learn at different moments: that the run should stop, that a save is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gridtron.core.communication import Pending, start_all_reduce

if TYPE_CHECKING:
    from torch import Tensor

    from gridtron.core.grid import Axis, Grid


@dataclass(frozen=True)
class Answer:
    """The same on every rank.

    Args:
        stop: some rank was asked to stop; 0, or the largest number of a signal.
        saved: on every rank the save behind the run is over.
    """

    stop: int
    saved: bool


class Question:
    """One exchange under way."""

    def __init__(self, values: Tensor, pending: Pending):
        self._values = values
        self._pending = pending

    def wait(self) -> Answer:
        self._pending.wait()
        stop, unsaved = self._values.tolist()
        return Answer(stop, not unsaved)


class Agreement:
    """Asked once a step, early enough that the answer is there when the step ends: two numbers over all ranks, on the
    CPU, beside the work on devices.

    Args:
        grid: of the run; every rank makes one at the same point.
    """

    def __init__(self, grid: Grid):
        self._axis: Axis = grid.everyone("agreement")

    def ask(self, stop: int, saved: bool) -> Question:
        """Every rank asks, with what it knows."""
        values = torch.tensor([stop, int(not saved)], dtype=torch.int64)
        return Question(values, start_all_reduce(values, self._axis, "max"))
