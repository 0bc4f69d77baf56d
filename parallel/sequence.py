"""Sequence parallelism for modules that know nothing of it (Korthikanti et al. 2022, arXiv:2205.05198).

Between tensor-parallel regions every rank holds its share of the sequence. A norm there sees only that share, so its
weight's gradient is a partial sum: its Sharding says so, and the sum over the axis follows from that.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gridtron.core.grid import Axis
from gridtron.core.sharding import Sharding


def sequence_parallel_region(module: nn.Module, axis: Any = None) -> nn.Module:
    """Declares that ``module`` runs on this rank's share of the sequence; returned for chaining.

    Every parameter of it that has no Sharding yet is whole on every rank with a partial gradient. DataParallel (also
    with no data axis) and full_state_dict then sum it over ``axis``.

    Example:
        >>> norm = sequence_parallel_region(nn.RMSNorm(1024), grid.tensor)
    """
    axis = Axis.of(axis)
    if axis.size == 1:
        return module
    for part in module.modules():
        known = getattr(part, "shardings", {})
        own = {
            name: Sharding.whole(tuple(parameter.shape), partial=True)
            for name, parameter in part.named_parameters(recurse=False)
            if name not in known
        }
        if own:
            part.shardings = {**known, **own}  # type: ignore[assignment]
            part.axis = axis
    return module
