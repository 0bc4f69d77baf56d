"""What must fit together where a run is made faster: overlap of communication with products."""

from __future__ import annotations

from collections.abc import Iterator

from gridtron.conf.schema import Plan
from gridtron.conf.values import Violation


def overlap_violations(plan: Plan, devices: int) -> Iterator[Violation]:
    """What does not fit; ``devices`` are the CUDA devices of the machine."""
    overlap = plan.grid.overlap
    if overlap == "none":
        return
    if not plan.grid.sequence_parallel:
        yield Violation(
            f"grid.overlap={overlap}: has no effect with grid.sequence_parallel=false; set "
            "grid.sequence_parallel=true, or leave it out",
            {"grid.overlap", "grid.sequence_parallel"},
        )
    if overlap == "symmetric_memory" and devices == 0:
        yield Violation(
            "grid.overlap=symmetric_memory: it needs CUDA devices that reach each other's memory, and there is none "
            "here; nearest: grid.overlap=chunked",
            {"grid.overlap"},
        )
