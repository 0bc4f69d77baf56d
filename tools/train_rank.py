"""One rank of ``gridtron train``: the grid, the assembled run, the loop; and what rank 0 alone writes and says."""

from __future__ import annotations

import errno
import gc
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.conf.schema import Plan, plan_from_dict, plan_to_dict
from gridtron.core.errors import JobError
from gridtron.core.launch import Launcher
from gridtron.tools.run_directory import METRICS, Decision, open_run
from gridtron.tools.run_environment import check_data, write_environment

if TYPE_CHECKING:
    from gridtron.core.grid import Grid
    from gridtron.core.training.callbacks import Callbacks
    from gridtron.core.training.interruption import Interruption
    from gridtron.core.training.loggers import ConsoleLogger
    from gridtron.core.training.loop import TrainingLoop
    from gridtron.core.training.protocols import Logger

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST_STEP = 300.0
"""Seconds after which a rank writes where it stands; half of the time after which a collective gives up."""


def run_rank(launcher: Launcher, decision: Decision) -> int:
    """Trains as one rank of the grid; returns the exit code."""
    from gridtron.core.training.interruption import Interruption

    with Interruption() as interruption:
        return _train(launcher, decision, interruption)


def _train(launcher: Launcher, decision: Decision, interruption: Interruption) -> int:
    from gridtron.core.grid import Grid
    from gridtron.tools.assemble import assemble
    from gridtron.tools.warm_start import warm_start

    plan = plan_from_dict(decision.plan)
    grid = Grid.create(
        plan.grid.data,
        plan.grid.pipeline,
        plan.grid.context,
        plan.grid.tensor,
        order=plan.grid.order,
        launcher=launcher,
    )
    directory = Path(decision.directory)
    assembly = assemble(plan, grid, directory)
    loop = make_loop(plan, grid, directory, assembly, interruption)
    if decision.checkpoint is not None:
        loop.resume(Path(decision.checkpoint), decision.own)
        if grid.rank == 0:
            if decision.own and not plan.checkpoint.allow_changes:
                check_data(directory, assembly.environment)
            decision = open_run(decision)
    elif plan.checkpoint.init_from is not None:
        notes = warm_start(plan, grid, assembly.engine, assembly.environment)
        decision = replace(decision, notes=(*decision.notes, *notes))
    loggers: list[Logger] = []
    try:
        if grid.rank == 0:
            write_environment(decision, _facts(grid, assembly.environment))
            loggers = _start_logging(plan, grid, decision, loop, assembly.environment)
        loop.loggers = loggers
        progress = loop.run()
    except OSError as error:
        if error.errno not in _FULL:
            if error.filename is not None and Path(str(error.filename)).is_relative_to(directory):
                raise JobError(
                    f"{error.filename}: {error.strerror}. It is not what a run leaves there: move it away, or choose "
                    "another run.directory"
                ) from None
            raise
        raise JobError(
            f"{error.filename or directory}: {error.strerror}. Make room, and start the same command with "
            f"run.directory={directory} again: it goes on from the last checkpoint"
        ) from None
    finally:
        for logger in loggers:
            logger.close()
    code = plan.launch.preempted_exit if loop.stopped_by else 0
    if grid.rank == 0:
        _say_end(loop, progress.step, directory)
    # Only now, when every rank has come to its end: ending the process group of a failed job would wait for its peers.
    grid.close()
    # What FSDP2 wraps refers to process groups in circles: let go while their threads can still be joined (Grid.close).
    del assembly, loop
    gc.collect()
    return code


def make_loop(
    plan: Plan, grid: Grid, directory: Path, assembly: Any, interruption: Interruption | None = None
) -> TrainingLoop:
    """The loop over an assembled run."""
    from gridtron.core.checkpoint.retention import Retention
    from gridtron.core.checkpoint.saver import Saver
    from gridtron.core.training.interruption import Interruption
    from gridtron.core.training.loop import TrainingLoop
    from gridtron.core.training.metrics import Work

    return TrainingLoop(
        engine=assembly.engine,
        data=assembly.training,
        grid=grid,
        directory=directory,
        learning_rate=make_learning_rate(plan, grid),
        total_steps=plan.train.steps,
        stop_after=plan.train.stop_after,
        evaluation=assembly.evaluation,
        evaluate_every=plan.evaluation.every,
        save_every=plan.checkpoint.every,
        saver=Saver(grid, plan.checkpoint.asynchronous, plan.checkpoint.copies, Retention.of(plan.checkpoint)),
        described={"plan": plan_to_dict(plan)},
        interruption=interruption or Interruption(),
        strict=plan.checkpoint.strict,
        callbacks=make_callbacks(plan, grid, assembly.engine),
        work=Work(assembly.flops_per_token, assembly.peak_flops, grid.world_size),
    )


def make_learning_rate(plan: Plan, grid: Grid) -> Callable[[int], float]:
    """The rate of a step: this project's schedules, or a plugin's, built as ``rate(step, base_lr, total_steps)``."""
    from gridtron.core.optim.schedule import learning_rate

    base, steps = plan.optimizer.lr, plan.train.steps
    if "lr_schedule" in plan.parts:
        rate = _registry(plan).builder("lr_schedule", plan.parts["lr_schedule"])(plan.lr_schedule, grid)
        return lambda step: float(rate(step, base, steps))
    return lambda step: learning_rate(step, plan.lr_schedule, base, steps)


def make_callbacks(plan: Plan, grid: Grid, engine: Any = None) -> Callbacks:
    """The callbacks that the plan asks for, then those of plugins."""
    from gridtron.core.precision import searches_scale
    from gridtron.core.training.callbacks import (
        Callbacks,
        GarbageCollection,
        ProfilerWindow,
        StackDump,
        StopOnNonFinite,
    )
    from gridtron.core.training.protocols import Callback

    train = plan.train
    made: list[Callback] = [
        StopOnNonFinite(train.max_nonfinite, train.on_nonfinite == "stop", searches_scale(plan.precision)),
        StackDump(_LONGEST_STEP),
    ]
    if train.garbage_collection_every:
        made.append(GarbageCollection(train.garbage_collection_every))
    if plan.logging.profile:
        first, last = plan.logging.profile.split(":")
        made.append(ProfilerWindow(int(first), int(last)))
    if plan.logging.trace and grid.pipeline.size > 1:
        from gridtron.tools.pipeline_trace import PipelineTrace

        final = min(plan.train.steps, plan.train.stop_after or plan.train.steps)
        made.append(PipelineTrace(engine.microbatches.runner, grid, final))
    if plan.callbacks:
        registry = _registry(plan)
        made += [registry.builder("callback", name)(config, grid) for name, config in plan.callbacks.items()]
    return Callbacks(made)


def _registry(plan: Plan) -> Any:
    from gridtron.conf.plugins import load_plugins

    return load_plugins(plan.plugins)


# -------------------------------------------------------------------- rank 0 alone
def _start_logging(
    plan: Plan, grid: Grid, decision: Decision, loop: TrainingLoop, facts: Mapping[str, Any]
) -> list[Logger]:
    from gridtron.core.optim.config import LRScheduleConfig
    from gridtron.core.optim.schedule import spans
    from gridtron.core.training.loggers import ConsoleLogger, JsonLinesLogger, TensorBoardLogger, show_grid

    directory = Path(decision.directory)
    done = loop.progress.step
    show_grid(grid.sizes.sizes, grid.sizes.order, {"run": decision.directory})
    if "recompute" in facts:
        counts = Counter(facts["recompute"])
        chosen = ", ".join(f"{policy} for {count} of {counts.total()} layers" for policy, count in counts.items())
        print(f"recompute.mode=auto: {chosen}", file=sys.stderr)
    console: ConsoleLogger = ConsoleLogger(plan.train.steps, done, plan.logging.every)
    warnings = (
        spans(plan.lr_schedule, plan.train.steps).warnings if isinstance(plan.lr_schedule, LRScheduleConfig) else ()
    )
    left_out = [f"checkpoint.strict=false: {listed}" for listed in loop.left_out]
    for note in (*decision.notes, *left_out, *(f"warning: {text}" for text in warnings)):
        console.note(note)
    loggers: list[Logger] = [console, JsonLinesLogger(directory / METRICS)]
    if plan.logging.tensorboard:
        loggers.append(TensorBoardLogger(directory / "tensorboard", done + 1 if done else 0))
    if plan.loggers:
        registry = _registry(plan)
        loggers += [registry.builder("logger", name)(config, grid) for name, config in plan.loggers.items()]
    return loggers


def _facts(grid: Grid, environment: dict[str, Any]) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "world_size": grid.world_size,
        "grid": dict(grid.sizes.sizes),
        "device": str(grid.device.type),
        "threads": torch.get_num_threads(),
    }
    if grid.device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(grid.device)
    return facts | environment


def _say_end(loop: TrainingLoop, step: int, directory: Path) -> None:
    if loop.stopped_by is not None:
        kept = "saved" if step else "nothing to save"
        print(
            f"stopped by {loop.stopped_by.name} after step {step} of {loop.total_steps}; {kept}: the same command with "
            f"run.directory={directory} goes on",
            file=sys.stderr,
        )
    elif step < loop.total_steps:
        print(f"stopped after step {step} of {loop.total_steps}, as asked; saved in {directory}", file=sys.stderr)
    else:
        print(f"done: {step} steps, saved in {directory}", file=sys.stderr)
