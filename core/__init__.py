"""What one rank is and owns: the grid, shardings, collectives, randomness, data, optimizers, checkpoints, the loop."""

from typing import Any

from gridtron.core.grid import Axis, Grid

__all__ = ["Axis", "Grid", "Ledger"]


def __getattr__(name: str) -> Any:
    # The ledger needs torch; the command line's refusals, which also import core, do not.
    if name == "Ledger":
        from gridtron.core.communication import Ledger

        return Ledger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
