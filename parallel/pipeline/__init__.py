"""Pipeline parallelism: schedules as tables, proven and simulated before they run, and one runner for all of them."""

from typing import TYPE_CHECKING, Any

from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.build import build_schedule
from gridtron.parallel.pipeline.csv_table import read_csv, write_csv
from gridtron.parallel.pipeline.families.forward_only import forward_only

# Functions named as their modules: imported here and now, for a module that is loaded later would take their names.
from gridtron.parallel.pipeline.lower import lower
from gridtron.parallel.pipeline.program import Program
from gridtron.parallel.pipeline.schedule import Schedule
from gridtron.parallel.pipeline.simulate import Timeline, simulate

if TYPE_CHECKING:
    from gridtron.parallel.pipeline.runner import PipelineRunner

__all__ = [
    "Action",
    "PipelineRunner",
    "Program",
    "Schedule",
    "Timeline",
    "build_schedule",
    "forward_only",
    "lower",
    "read_csv",
    "simulate",
    "write_csv",
]


def __getattr__(name: str) -> Any:
    # The runner needs torch; schedules are proven, simulated and drawn without.
    if name == "PipelineRunner":
        from gridtron.parallel.pipeline.runner import PipelineRunner

        return PipelineRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
