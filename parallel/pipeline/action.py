"""The cell of a schedule's table: one computation of one stage on one microbatch."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = ("F", "B", "I", "W")
"""Forward; whole backward; its two halves: gradient of the input, gradient of the weights (Qi et al. 2023)."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One computation, printed as ``2F0``: stage, kind, microbatch.

    Args:
        kind: "F" forward, "B" backward, "I" gradient of the input, "W" gradient of the weights.
        stage: from 0, which reads the inputs.
        microbatch: from 0.

    Raises:
        ValueError: an unknown kind or a negative number.
    """

    kind: str
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} of an action: it is one of {', '.join(KINDS)}")
        if self.stage < 0 or self.microbatch < 0:
            raise ValueError(f"stage={self.stage} and microbatch={self.microbatch} of an action count from 0")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as ``text``.

        Raises:
            ValueError: anything else.
        """
        match = re.fullmatch(r"\s*(\d+)([FBIW])(\d+)\s*", text, re.ASCII)
        if match is None:
            raise ValueError(f"{text!r} is no action; one reads as 2F0: stage, {'|'.join(KINDS)}, microbatch")
        return Action(match[2], int(match[1]), int(match[3]))
