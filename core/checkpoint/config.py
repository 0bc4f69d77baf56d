"""Options of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = option(0, "steps between checkpoints; 0: only at the end", minimum=0)
    resume: str = option("auto", "auto (the newest in run.directory), never, or the path of a checkpoint", path=True)
    allow_changes: bool = option(False, "resume although the mathematics of the run changed")
