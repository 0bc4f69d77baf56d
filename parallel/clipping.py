"""Clipping by the norm of the whole gradient, for a loop of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gridtron.core.optim.norm import Held, clip_, gradient_norm
from gridtron.parallel.data_parallel.wrapper import DataParallel

if TYPE_CHECKING:
    from gridtron.core.grid import Grid


def clip_gradients(model: DataParallel, limit: float, grid: Grid | None = None) -> float:
    """Scales ``.grad`` of ``model.optimizer_parameters()`` so that the norm of the whole gradient is at most ``limit``.

    Between ``finish_step()`` and the optimizer's step; every rank calls it. Every parameter counts once, however ranks
    hold and cut it, where ``torch.nn.utils.clip_grad_norm_`` would see this rank's ranges alone.

    Args:
        model: after ``finish_step()``.
        limit: largest norm.
        grid: of a model over tensor or pipeline ranks.

    Returns:
        The norm before clipping, the same on every rank.
    """
    held, counted = [], []
    for item in model.named:
        gradient = model.part(item.parameter).grad if item.parameter.requires_grad else None
        if gradient is not None:
            found = Held(gradient, model.piece(item))
            held.append(found)
            counted += [found] if item.stands_for_all else []
    axes = [] if grid is None else [grid.tensor, grid.pipeline]
    device = next(model.module.parameters()).device
    norm = gradient_norm(counted, axes, device, model.shards if model.shards.size > 1 else None)
    clip_(held, norm, limit)
    return float(norm)
