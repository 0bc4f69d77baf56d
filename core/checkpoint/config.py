"""Options of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = option(0, "steps between checkpoints; 0: only at the end", minimum=0)
    resume: str = option("auto", "auto (the newest in run.directory), never, or the path of a checkpoint", path=True)
    init_from: str | None = option(
        None,
        "weights to begin with where the run has no checkpoint: a Hugging Face folder, a checkpoint, a run's folder",
        path=True,
    )
    asynchronous: bool = option(
        False, "write from a copy of the state while training goes on; one save at a time, told when it is on the disk"
    )
    copies: int = option(
        1,
        "ranks that write each row, where so many hold it (replicas over data and tensor): with 2, what is damaged in "
        "one file can be put back by gridtron checkpoint verify repair=true",
        minimum=1,
    )
    keep: int | None = option(None, "the newest checkpoints that are kept; null: all", minimum=1)
    keep_every: int = option(0, "steps: checkpoints at multiples of it are kept whatever keep says; 0: none", minimum=0)
    keep_best: int = option(0, "so many checkpoints with the lowest keep_metric are kept whatever keep says", minimum=0)
    keep_metric: str = option(
        "eval_loss",
        "what keep_best goes by: the newest value when the checkpoint was made",
        choices=("eval_loss", "loss"),
    )
    strict: bool = option(
        True, "names that only the checkpoint or only this run has are an error; false: they are left out, and listed"
    )
    allow_changes: bool = option(False, "resume although the mathematics of the run changed")
