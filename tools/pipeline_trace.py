"""``logging.trace=true``: when each pipeline rank really computed what, beside what the simulator expects of it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from gridtron.core.communication import gather_values
from gridtron.core.training.callbacks import BaseCallback
from gridtron.core.training.protocols import RunInfo
from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.chrome_trace import write_chrome_trace
from gridtron.parallel.pipeline.simulate import Event, Timeline, simulate
from gridtron.parallel.pipeline.trace import Trace

if TYPE_CHECKING:
    from gridtron.core.grid import Grid
    from gridtron.parallel.pipeline.runner import PipelineRunner
    from gridtron.parallel.pipeline.schedule import Schedule

_WARM = 3
"""The step of a start that is traced: shapes are known and memory is there by then."""


class PipelineTrace(BaseCallback):
    """Traces one step of each start, the third or the last before it, and writes it to the run's ``trace/``.

    Every group of pipeline ranks writes a file of its own. Rank 0 says what part of the time was idle, and what part
    the simulator expects with the same costs: the difference is transfers, and ranks that wait for the processor.

    Args:
        runner: runs the microbatches.
        grid: of the run.
        last: the last step of this start.
    """

    def __init__(self, runner: PipelineRunner, grid: Grid, last: int):
        self.runner, self.grid, self.last = runner, grid, last
        self.folder = Path()
        self.step = 0

    def on_start(self, run: RunInfo, step: int) -> None:
        self.step = min(step + _WARM, self.last)
        self.folder = Path(run.directory) / "trace"

    def on_step_start(self, step: int) -> None:
        if step == self.step:
            self.runner.trace = Trace(self.grid.device)

    def on_step_end(self, step: int, row: Mapping[str, Any]) -> None:
        trace, self.runner.trace = self.runner.trace, None
        if trace is None:
            return
        own = [(str(span.action), span.start, span.end) for span in trace.spans]
        rows = gather_values(own, self.grid.pipeline)
        if self.grid.pipeline.rank != 0:
            return
        measured = measured_timeline(self.runner.schedule, rows)
        place = {name: index for name, index in self.grid.coordinate().items() if name != "pipeline" and index}
        suffix = "".join(f"-{name}{index}" for name, index in place.items())
        file = self.folder / f"step-{step:08d}{suffix}.json"
        self.folder.mkdir(exist_ok=True)
        write_chrome_trace(enumerate(measured.events), file, microseconds=1e6)
        if self.grid.rank == 0:
            print(report(step, measured, file), file=sys.stderr)


def measured_timeline(schedule: Schedule, rows: Sequence[Sequence[tuple[str, float, float]]]) -> Timeline:
    """What ran, as the simulator's timeline holds it.

    Args:
        schedule: that was run.
        rows: per rank, (action, start, end) in seconds of one clock.
    """
    begin = min(start for row in rows for _, start, _ in row)
    events = tuple(
        tuple(Event(rank, Action.parse(text), start - begin, end - begin) for text, start, end in row)
        for rank, row in enumerate(rows)
    )
    return Timeline(schedule, events, simulate(schedule).peak_activations)


def expected_timeline(measured: Timeline) -> Timeline:
    """The simulation with the mean measured cost of each kind of action on each stage; transfers cost nothing."""
    spent: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in measured.events:
        for event in row:
            spent[event.action.kind, event.action.stage].append(event.end - event.start)
    costs = {key: mean(values) for key, values in spent.items()}
    stages = range(measured.schedule.num_stages)
    # A stage whose backward passes are whole has no halves: the whole stands for one of them.
    whole = [costs.get(("B", stage), 0.0) for stage in stages]
    halves = [("I", stage) in costs for stage in stages]
    return simulate(
        measured.schedule,
        forward=[costs.get(("F", stage), 0.0) for stage in stages],
        input_grad=[costs["I", stage] if halves[stage] else whole[stage] for stage in stages],
        weight_grad=[costs.get(("W", stage), 0.0) for stage in stages],
    )


def report(step: int, measured: Timeline, file: Path) -> str:
    """One line for a person."""
    expected = expected_timeline(measured)
    return (
        f"pipeline of step {step}: bubble {100 * measured.bubble_fraction:.1f} % measured, "
        f"{100 * expected.bubble_fraction:.1f} % simulated; makespan {1000 * measured.makespan:.1f} ms measured, "
        f"{1000 * expected.makespan:.1f} ms simulated ({measured.schedule.name}; {file})"
    )
