"""Timelines as files for a trace viewer (chrome://tracing, ui.perfetto.dev), simulated and measured ones alike."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from gridtron.parallel.pipeline.action import Action

_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# Reserved colours of the viewer.
_COLOURS = {"F": "thread_state_running", "B": "rail_animation", "I": "rail_response", "W": "good"}


class Spent(Protocol):
    """When an action ran: the simulator's events and the runner's spans."""

    @property
    def action(self) -> Action: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def write_chrome_trace(rows: Iterable[tuple[int, Iterable[Spent]]], path: str | Path, microseconds: float) -> None:
    """Writes the JSON that trace viewers read: one track per rank.

    Args:
        rows: (rank, what ran there).
        path: of the file; replaced as a whole.
        microseconds: how many one unit of time is.
    """
    from gridtron.core.files import write_whole

    events: list[dict[str, Any]] = []
    for rank, spans in rows:
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}})
        for span in spans:
            action = span.action
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": _NAMES[action.kind],
                    "cname": _COLOURS[action.kind],
                    "pid": 0,
                    "tid": rank,
                    "ts": span.start * microseconds,
                    "dur": (span.end - span.start) * microseconds,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    write_whole(Path(path), json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
