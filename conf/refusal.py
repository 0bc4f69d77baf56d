"""A request that was not carried out, with every reason."""

from __future__ import annotations

from collections.abc import Sequence


class Refusal(ValueError):  # noqa: N818
    """A request that is wrong: nothing was started.

    Attributes:
        violations: one line each: what was asked, the rule, the nearest that fits.
    """

    def __init__(self, violations: Sequence[str]):
        self.violations = list(violations)
        super().__init__("\n".join(self.violations))


def format_refusal(refusal: Refusal) -> str:
    """What the command prints: a heading and a line for each violation."""
    count = len(refusal.violations)
    heading = "refused, nothing was started:" if count == 1 else f"refused for {count} reasons, nothing was started:"
    return "\n".join([f"gridtron: {heading}", *(f"  {line}".replace("\n", "\n  ") for line in refusal.violations)])
