"""Options of pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class PipelineConfig:
    schedule: str = option(
        "1f1b",
        "order of forward and backward passes: a family (the files of this group), or FILE.csv, a table of your own",
        path=True,
    )
    chunks: int | None = option(None, "stages that each rank holds; null: what the family needs", minimum=1)
    layers_per_stage: list[int] | None = option(
        None, "decoder layers of each stage, in order; null: balanced by cost", minimum=1
    )
