"""Rules of checkpoints: where a run begins, and which of its checkpoints it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gridtron.conf.schema import Plan
from gridtron.conf.values import Violation
from gridtron.core.checkpoint.config import CheckpointConfig


def checkpoint_violations(plan: Plan) -> Iterator[Violation]:
    """Every rule that the plan's checkpoints break."""
    yield from _beginning(plan.checkpoint)
    yield from _keeping(plan)


def _beginning(chosen: CheckpointConfig) -> Iterator[Violation]:
    if chosen.resume not in ("auto", "never"):
        if not Path(chosen.resume).exists():
            yield Violation(
                f"checkpoint.resume={chosen.resume}: no such checkpoint; give auto, never, or the path of one, as in "
                "RUN/checkpoints/step-00000100",
                {"checkpoint.resume"},
            )
        if chosen.init_from is not None:
            yield Violation(
                f"checkpoint.init_from={chosen.init_from} and checkpoint.resume={chosen.resume}: a run begins with "
                "weights alone, or goes on with all of a checkpoint; leave one out",
                {"checkpoint.init_from", "checkpoint.resume"},
            )


def _keeping(plan: Plan) -> Iterator[Violation]:
    chosen = plan.checkpoint
    for name in ("keep_every", "keep_best"):
        value = getattr(chosen, name)
        if value and chosen.keep is None:
            yield Violation(
                f"checkpoint.{name}={value}: has no effect without checkpoint.keep, by which all are kept; give "
                "checkpoint.keep=1 or more as well, or leave it out",
                {f"checkpoint.{name}", "checkpoint.keep"},
            )
    if chosen.keep_best and chosen.keep_metric == "eval_loss" and not plan.evaluation.every:
        yield Violation(
            f"checkpoint.keep_best={chosen.keep_best}: goes by eval_loss, and evaluation.every=0 never evaluates; set "
            "evaluation.every, or checkpoint.keep_metric=loss",
            {"checkpoint.keep_best", "checkpoint.keep_metric", "evaluation.every"},
        )
    if chosen.keep_every and chosen.every and chosen.keep_every % chosen.every:
        nearest = max(round(chosen.keep_every / chosen.every), 1) * chosen.every
        yield Violation(
            f"checkpoint.keep_every={chosen.keep_every}: is no multiple of checkpoint.every={chosen.every}, so few of "
            f"these steps have a checkpoint; nearest: {nearest}",
            {"checkpoint.keep_every", "checkpoint.every"},
        )
