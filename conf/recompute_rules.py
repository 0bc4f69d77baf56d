"""What must fit together where activations are recomputed, and the memory of a plan's ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gridtron.conf.pipeline_rules import plan_microbatches, plan_schedule, splits_backward
from gridtron.conf.schema import Plan
from gridtron.conf.values import Violation
from gridtron.models.cost.choice import BudgetError, choose_recompute
from gridtron.models.cost.memory import MemorySettings
from gridtron.parallel.operations import operations_fault


def memory_settings(plan: Plan, sizes: Mapping[str, int], precision: str) -> MemorySettings:
    """What decides how many bytes the ranks of a plan hold.

    Args:
        plan: of a run of this project's GPT, with vocab_size.
        sizes: of the grid's axes.
        precision: of the run, "auto" resolved.

    Raises:
        ValueError: a schedule that cannot be built.
    """
    data, pipeline = sizes["data"] * sizes["context"], sizes["pipeline"]
    layers = plan.pipeline.layers_per_stage
    name = plan.optimizer.name if "optimizer" not in plan.parts else "adamw"
    return MemorySettings(
        plan.model,
        plan.train.sequence_length,
        plan.train.micro_batch_size,
        plan_microbatches(plan, data),
        data,
        sizes["tensor"],
        plan_schedule(plan, pipeline, data) if pipeline > 1 else None,
        None if layers is None else tuple(layers),
        plan.grid.sequence_parallel and sizes["tensor"] > 1,
        plan.recompute,
        zero=plan.data_parallel.zero,
        shard_size=plan.data_parallel.shard_size,
        bucket_bytes=plan.data_parallel.bucket_bytes,
        reduce=plan.data_parallel.reduce,
        precision=precision,
        optimizer=name,
        momentum=getattr(plan.optimizer, "momentum", 0.0),
        chunked_loss=plan.kernels.chunked_loss,
    )


def recompute_violations(plan: Plan, sizes: Mapping[str, int], own_model: bool, devices: int) -> Iterator[Violation]:
    """What does not fit.

    Args:
        plan: of the run.
        sizes: of the grid's axes.
        own_model: whether the layers are this project's GPT's, whose memory is known.
        devices: CUDA devices of the machine, where precision.mode is auto.
    """
    chosen = plan.recompute
    if chosen.operations is not None:
        yield from _operations_violations(plan, sizes)
    if chosen.mode != "full" and chosen.layers is not None:
        yield Violation(
            f"recompute.layers={chosen.layers}: has no effect with recompute.mode={chosen.mode}; set "
            "recompute.mode=full, or leave it out",
            {"recompute.layers", "recompute.mode"},
        )
    if chosen.mode != "auto" and chosen.budget_bytes is not None:
        yield Violation(
            f"recompute.budget_bytes={chosen.budget_bytes}: nothing is chosen by it with recompute.mode={chosen.mode}; "
            "set recompute.mode=auto, or leave it out",
            {"recompute.budget_bytes", "recompute.mode"},
        )
    if chosen.mode != "auto":
        return
    if chosen.budget_bytes is None:
        yield Violation(
            "recompute.mode=auto: it chooses by what a rank may hold at a step's peak; set recompute.budget_bytes, as "
            "in recompute.budget_bytes=64e9, or recompute.mode=selective",
            {"recompute.budget_bytes", "recompute.mode"},
        )
    elif not own_model:
        yield Violation(
            "recompute.mode=auto: the memory of a model of your own is not known; nearest: recompute.mode=none, and "
            "gridtron.parallel.activation_checkpoint in its layers",
            {"recompute.mode", "model.build"},
        )
    else:
        yield from _budget_violations(plan, sizes, chosen.budget_bytes, devices)


def _operations_violations(plan: Plan, sizes: Mapping[str, int]) -> Iterator[Violation]:
    chosen, keys = plan.recompute, {"recompute.operations", "recompute.mode"}
    assert chosen.operations is not None
    shown = f"recompute.operations=[{','.join(chosen.operations)}]"
    if fault := operations_fault(chosen.operations):
        yield Violation(f"{shown}: {fault}", {"recompute.operations"})
    if chosen.mode != "selective":
        yield Violation(
            f"{shown}: has no effect with recompute.mode={chosen.mode}; set recompute.mode=selective, or leave it out",
            keys,
        )
    elif splits_backward(plan, sizes):
        yield Violation(
            f"{shown} with pipeline.schedule={plan.pipeline.schedule}: a list of operations does not go with a "
            "schedule that splits the backward pass; nearest: recompute.operations=null, or pipeline.schedule=1f1b",
            {*keys, "pipeline.schedule"},
        )


def _budget_violations(plan: Plan, sizes: Mapping[str, int], budget: int, devices: int) -> Iterator[Violation]:
    precision = plan.precision.mode
    if precision == "auto":
        precision = "bf16" if devices else "fp32"
    if plan.model.vocab_size is None or plan.model.violations():
        return
    try:
        settings = memory_settings(plan, sizes, precision)
        settings.ranges()
    except ValueError:
        return  # another rule's
    try:
        choose_recompute(settings, budget)
    except BudgetError as fault:
        yield Violation(
            f"recompute.budget_bytes={budget}: {fault}; nearest: recompute.budget_bytes={fault.need}, a smaller "
            "train.micro_batch_size, more tensor or pipeline ranks, or data_parallel.zero",
            {"recompute.budget_bytes", "train.micro_batch_size", "grid.tensor", "grid.pipeline"},
        )
