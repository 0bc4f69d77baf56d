"""The learning rate as a function of the step: no state, so a resumed run has the rate of the run that went on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gridtron.core.optim.config import LRScheduleConfig


@dataclass(frozen=True)
class Spans:
    """Lengths of a schedule's parts, cut to the run.

    Args:
        warmup: steps of linear warm-up; the last of them has the full rate.
        decay: steps from the full to the lowest rate.
        decay_start: the last step with the full rate.
        warnings: what was cut, one line each.
    """

    warmup: int
    decay: int
    decay_start: int
    warnings: tuple[str, ...] = ()


def spans(config: LRScheduleConfig, total_steps: int) -> Spans:
    """The parts of ``config``'s schedule in a run of ``total_steps``."""
    warnings = []
    warmup = min(config.warmup_steps, total_steps)
    if warmup < config.warmup_steps:
        warnings.append(
            f"lr_schedule.warmup_steps={config.warmup_steps} is longer than the run: cut to train.steps={total_steps}"
        )
    left = total_steps - warmup
    wanted = config.decay_steps
    if config.name == "constant":
        return Spans(warmup, 0, total_steps, tuple(warnings))
    if wanted is None:
        wanted = left if config.name in ("cosine", "linear") else max(1, total_steps // 10)
        decay = min(wanted, left)
    else:
        decay = min(wanted, left)
        if decay < wanted:
            warnings.append(f"lr_schedule.decay_steps={wanted} is longer than what follows the warm-up: cut to {decay}")
    start = total_steps - decay if config.name == "wsd" else warmup
    return Spans(warmup, decay, start, tuple(warnings))


def learning_rate(step: int, config: LRScheduleConfig, base_lr: float, total_steps: int) -> float:
    """The rate of step ``step`` (from 1) of a run of ``total_steps``.

    Linear from 0 to ``base_lr`` over the warm-up, then down to ``min_ratio * base_lr``: along half a cosine
    (Loshchilov & Hutter 2017, arXiv:1608.03983), along a line, only over the last steps ("wsd": warm-up, stable,
    decay; Hu et al. 2024, arXiv:2404.06395), or not at all ("constant").
    """
    assert step >= 1, step
    parts = spans(config, total_steps)
    if step <= parts.warmup:
        return base_lr * step / parts.warmup
    if step <= parts.decay_start:
        return base_lr
    progress = min(1.0, (step - parts.decay_start) / parts.decay) if parts.decay else 1.0
    share = (1 + math.cos(math.pi * progress)) / 2 if config.name == "cosine" else 1 - progress
    return base_lr * (config.min_ratio + (1 - config.min_ratio) * share)
