"""When what ran on this rank: the measured counterpart of the simulator's timeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gridtron.parallel.pipeline.action import Action


@dataclass(frozen=True)
class Span:
    """One action's start and end in seconds of this machine's clock."""

    action: Action
    start: float
    end: float


@dataclass
class Trace:
    """Collects the spans of one call of the runner; on a GPU each action is waited for, which slows it."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        start = self._now()
        yield
        self.spans.append(Span(action, start, self._now()))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # One clock for all processes of a machine, so that ranks can be drawn side by side.
        return time.time()
