"""Which checkpoints of a run are kept when there is a newer one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gridtron.core.checkpoint.config import CheckpointConfig
from gridtron.core.checkpoint.layout import CheckpointError, complete_checkpoints, deleted_path, step_of
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.core.files import Files


@dataclass(frozen=True)
class Retention:
    """The newest ``last``, those at multiples of ``every`` steps, and the ``best`` by ``metric`` are kept.

    Args:
        last: None: all are kept.
        every: steps; 0: none for this reason.
        best: how many with the lowest value.
        metric: name of a value that a checkpoint holds of its run ("eval_loss", "loss").
    """

    last: int | None = None
    every: int = 0
    best: int = 0
    metric: str = "eval_loss"

    @staticmethod
    def of(config: CheckpointConfig) -> Retention:
        return Retention(config.keep, config.keep_every, config.keep_best, config.keep_metric)

    def superfluous(self, steps: Sequence[int], values: Mapping[int, float]) -> list[int]:
        """Of the steps at which there are checkpoints, those that need not be kept; the newest always is.

        Args:
            steps: of all complete checkpoints.
            values: of the metric, by step, where it is known.
        """
        if self.last is None:
            return []
        ordered = sorted(steps)
        kept = set(ordered[-max(self.last, 1) :])
        if self.every:
            kept |= {step for step in ordered if step % self.every == 0}
        known = [step for step in ordered if not math.isnan(values.get(step, math.nan))]
        kept |= set(sorted(known, key=lambda step: (values[step], step))[: self.best])
        return [step for step in ordered if step not in kept]


def prune(root: Path, retention: Retention, files: Files, known: dict[int, float]) -> list[int]:
    """Deletes the checkpoints under ``root`` that ``retention`` does not keep; returns their steps.

    Each loses its name before its files, so that what an interrupted deletion leaves is not taken for a checkpoint.

    Args:
        known: values of the metric by step; those of other checkpoints are read from them once, and added.
    """
    found = {step_of(path) or 0: path for path in complete_checkpoints(root)}
    if retention.best:
        known |= {step: _value(path, retention.metric) for step, path in found.items() if step not in known}
    deleted = retention.superfluous(list(found), known)
    for step in deleted:
        nameless = deleted_path(found[step])
        files.remove(nameless)
        files.rename(found[step], nameless)
        files.remove(nameless)
    return deleted


def _value(path: Path, metric: str) -> float:
    try:
        value = Manifest.read(path).extra["metrics"][metric]
        return float(value)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return math.nan
