"""How a config dataclass, beside the part it configures, states an option: default, meaning, and what is allowed.

The command line checks every override against these, the table in docs/ is generated from them.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any,
    meaning: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    path: bool = False,
) -> Any:
    """A dataclass field with the facts a checker and a reader need.

    Args:
        default: immutable, or a list (copied for each instance).
        meaning: one line, with units.
        choices: all allowed values, where they are few.
        minimum, maximum: inclusive bounds; ``above`` and ``below``: exclusive ones.
        path: a file, folder or pattern: quoted and expanded at the command line.
    """
    metadata = {
        "meaning": meaning,
        "choices": choices,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "below": below,
        "path": path,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
