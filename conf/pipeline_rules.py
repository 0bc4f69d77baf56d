"""Which schedule a plan asks for, and what must fit it: ranks, microbatches, chunks, layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from gridtron.conf.schema import Plan
from gridtron.conf.values import Violation
from gridtron.models.partition import counts_fault
from gridtron.parallel.pipeline.build import FAMILIES, build_schedule
from gridtron.parallel.pipeline.schedule import Schedule

_KEYS = frozenset({"pipeline.schedule", "pipeline.chunks"})


def plan_schedule(plan: Plan, ranks: int, data: int) -> Schedule:
    """The schedule of a step on ``ranks`` pipeline ranks and ``data`` data ranks.

    Raises:
        ValueError: a family that does not exist, chunks that it does not have, a file that does not fit.
    """
    return build_schedule(plan.pipeline.schedule, ranks, plan_microbatches(plan, data), plan.pipeline.chunks)


def splits_backward(plan: Plan, sizes: Mapping[str, int]) -> bool:
    """Whether the plan's schedule splits the backward pass; False where there is none that can be built."""
    if sizes["pipeline"] == 1:
        return False
    try:
        return plan_schedule(plan, sizes["pipeline"], sizes["data"] * sizes["context"]).splits_backward
    except ValueError:
        return False


def plan_microbatches(plan: Plan, data: int) -> int:
    """How many microbatches a data rank runs a step."""
    return plan.train.global_batch_size // (plan.train.micro_batch_size * data)


def schedule_violations(plan: Plan, sizes: Mapping[str, int], own_model: bool) -> Iterator[Violation]:
    """What does not fit.

    Args:
        plan: of the run.
        sizes: of the grid's axes.
        own_model: whether the layers are this project's GPT's, whose number is known.
    """
    if plan.pipeline.schedule.endswith(".csv"):
        table = _read_table(plan.pipeline.schedule)
        if isinstance(table, Violation):
            yield table
            return
        yield from _table_violations(plan, sizes, table)
        own_model = own_model and table.ranks == sizes["pipeline"]
        schedule = table
    else:
        try:
            # A family that serves one microbatch serves any number.
            schedule = build_schedule(plan.pipeline.schedule, sizes["pipeline"], 1, plan.pipeline.chunks)
        except ValueError as fault:
            yield Violation(re.sub(r"(?<![\w.])(?=(?:schedule|chunks)=)", "pipeline.", str(fault)), _KEYS)
            return
    if own_model:
        yield from _split_violations(plan, schedule)


def _read_table(path: str) -> Schedule | Violation:
    """A file's schedule, proven with the program that it is lowered to; or why it cannot run."""
    from gridtron.parallel.pipeline.csv_table import read_csv
    from gridtron.parallel.pipeline.lower import lower

    try:
        table = read_csv(Path(path))
        lower(table).validate()
    except ValueError as fault:
        return Violation(f"pipeline.schedule: {fault}", _KEYS)
    return table


def _table_violations(plan: Plan, sizes: Mapping[str, int], table: Schedule) -> Iterator[Violation]:
    """A table is of so many ranks, microbatches and chunks, and the run must be as well."""
    path, ranks, data = plan.pipeline.schedule, sizes["pipeline"], sizes["data"]
    if table.ranks != ranks:
        yield Violation(
            f"grid.pipeline={ranks}: pipeline.schedule={path} is a table for {table.ranks} ranks; "
            f"nearest: grid.pipeline={table.ranks}",
            {"grid.pipeline", *_KEYS},
        )
    batch, micro = plan.train.global_batch_size, plan.train.micro_batch_size
    found = plan_microbatches(plan, data)
    if batch % (micro * data) == 0 and found != table.microbatches:
        yield Violation(
            f"train.global_batch_size={batch}: {found} microbatches of train.micro_batch_size={micro} on data={data}, "
            f"and pipeline.schedule={path} is a table for {table.microbatches}; "
            f"nearest: train.global_batch_size={table.microbatches * micro * data}",
            {"train.global_batch_size", "train.micro_batch_size", "grid.data", *_KEYS},
        )
    held = max(len(table.stages(rank)) for rank in range(table.ranks))
    if plan.pipeline.chunks not in (None, held):
        yield Violation(
            f"pipeline.chunks={plan.pipeline.chunks}: pipeline.schedule={path} has {held} stages a rank; "
            "nearest: pipeline.chunks=null",
            _KEYS,
        )


def _split_violations(plan: Plan, schedule: Schedule) -> Iterator[Violation]:
    """Layers over the stages of a schedule; on one rank the model is whole."""
    stages, layers, ranks = schedule.num_stages, plan.model.num_layers, schedule.ranks
    if stages > layers and ranks > 1:
        chunks = -(-stages // ranks)
        fewer = layers // ranks
        flexible = schedule.name in FAMILIES and FAMILIES[schedule.name].any_chunks
        yield Violation(
            f"model.num_layers={layers} over {stages} stages (grid.pipeline={ranks}, {chunks} a rank in "
            f"{schedule.name}): each stage holds at least one layer; nearest: model.num_layers={stages}"
            + (f", grid.pipeline={layers // chunks}" if layers >= chunks else "")
            + (f", pipeline.chunks={fewer}" if flexible and 1 <= fewer < chunks else ""),
            {"model.num_layers", "grid.pipeline", *_KEYS},
        )
    elif plan.pipeline.layers_per_stage is not None:
        fault = counts_fault(plan.pipeline.layers_per_stage, stages, layers)
        if fault is not None:
            yield Violation(
                f"pipeline.{fault.replace('num_layers=', 'model.num_layers=')}",
                {"pipeline.layers_per_stage", "model.num_layers", "grid.pipeline"},
            )
