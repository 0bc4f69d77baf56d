"""A plan and a grid become the parts of a run: model, engine, data. Shared by every command that runs a model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gridtron.conf.pipeline_rules import plan_schedule
from gridtron.conf.schema import Plan
from gridtron.core.errors import JobError
from gridtron.core.kernels.config import AVAILABLE, KernelsConfig, resolve
from gridtron.core.precision import LossScaler, parameter_dtype

if TYPE_CHECKING:
    from torch import nn

    from gridtron.core.data.stream import EvaluationStream, SampleSource, TrainingStream
    from gridtron.core.grid import Grid
    from gridtron.parallel.engine import TrainingEngine
    from gridtron.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Assembly:
    """The parts of one rank's run.

    Args:
        engine: runs steps.
        training: this data rank's microbatches by position.
        evaluation: held-out batches, or None where there is no evaluation.
        flops_per_token: forward and backward of the whole model; 0 where it is not known (a model of the user's own).
        peak_flops: of one device, or None where it is not known.
        environment: facts of the run for environment.json.
    """

    engine: TrainingEngine
    training: TrainingStream
    evaluation: EvaluationStream | None
    flops_per_token: float
    peak_flops: float | None
    environment: dict[str, Any]


def assemble(plan: Plan, grid: Grid, run_directory: Any = None) -> Assembly:
    """Builds everything that the loop needs on this rank.

    Args:
        plan: composed and checked.
        grid: the running grid.
        run_directory: unused by the parts themselves; plugins may want it.
    """
    from gridtron.conf.plugins import load_plugins
    from gridtron.core.capabilities import peak_flops
    from gridtron.models.cost.flops import training_flops
    from gridtron.parallel.engine import TrainingEngine

    registry = load_plugins(plan.plugins)
    builders = {
        section: registry.builder(section, name) for section, name in plan.parts.items() if section != "lr_schedule"
    }
    training, evaluation, facts = build_data(plan, grid, builders.get("data"))
    schedule = build_schedule(plan, grid)
    policies = choose_policies(plan, grid)
    if policies is not None:
        facts["recompute"] = list(policies)
    kernels = choose_kernels(plan, grid)
    facts["kernels"] = {name: kernels.of(name) for name in AVAILABLE}
    model = build_model(plan, grid, builders.get("model"), schedule, policies, kernels)
    engine = TrainingEngine(
        model,
        grid,
        plan.optimizer,
        plan.data_parallel,
        build_optimizer=bound(builders.get("optimizer"), plan, grid),
        schedule=schedule,
        loss_scaler=LossScaler.of(plan.precision),
        grad_norms=plan.logging.grad_norms,
        adamw=kernels.of("adamw"),
    )
    dtype = parameter_dtype(plan.precision.mode, grid.device)
    flops = float(training_flops(plan.model, plan.train.sequence_length)) if is_own_model(plan) else 0.0
    return Assembly(engine, training, evaluation, flops, peak_flops(grid.device, dtype), facts)


def choose_kernels(plan: Plan, grid: Grid) -> KernelsConfig:
    """The plan's choice of kernels with every operation's named, for this rank's device."""
    from gridtron.core.capabilities import find_capabilities

    found = find_capabilities(os.environ)
    return resolve(plan.kernels, found if grid.device.type == "cuda" else replace(found, cuda_devices=()))


def is_own_model(plan: Plan) -> bool:
    """Whether the model is this project's GPT, whose costs are known."""
    return "model" not in plan.parts and plan.model.build is None


def bound(build: Callable[..., Any] | None, plan: Plan, grid: Grid) -> Callable[..., Any] | None:
    """A plugin's optimizer: its builder gives a function from parameter groups to a torch.optim.Optimizer."""
    return None if build is None else build(plan.optimizer, grid)


def build_schedule(plan: Plan, grid: Grid) -> Schedule | None:
    """The pipeline schedule of a plan's steps; None where the model is whole on each rank.

    Raises:
        JobError: a file that is not what it was when the plan was composed.
    """
    if grid.pipeline.size == 1:
        return None
    try:
        return plan_schedule(plan, grid.pipeline.size, grid.axis("data", "context").size)
    except ValueError as fault:
        raise JobError(f"pipeline.schedule: {fault}", agreed=True) from None


def choose_policies(plan: Plan, grid: Grid) -> tuple[str, ...] | None:
    """What is recomputed of each layer under ``recompute.mode=auto``; None under any other, which says it.

    Raises:
        JobError: nothing fits the budget (on a device of another precision than the plan was composed for).
    """
    if plan.recompute.mode != "auto" or not is_own_model(plan):
        return None
    from gridtron.conf.recompute_rules import memory_settings
    from gridtron.models.cost.choice import choose_recompute

    assert plan.recompute.budget_bytes is not None, "refused by the rules"
    precision = plan.precision.mode
    if precision == "auto":
        precision = "bf16" if parameter_dtype(precision, grid.device).itemsize == 2 else "fp32"
    axes = ("data", "context", "tensor", "pipeline")
    sizes = {name: grid.axis(name).size for name in axes}
    try:
        return choose_recompute(memory_settings(plan, sizes, precision), plan.recompute.budget_bytes)
    except ValueError as fault:
        raise JobError(f"recompute.budget_bytes: {fault}", agreed=True) from None


def build_model(
    plan: Plan,
    grid: Grid,
    build: Callable[..., Any] | None = None,
    schedule: Schedule | None = None,
    policies: tuple[str, ...] | None = None,
    kernels: KernelsConfig | None = None,
) -> nn.Module:
    """The model of a plan on this rank: this GPT, a plugin's, or the one that ``model.build`` names.

    A user's own model is made under the run's seed, so that every rank makes the same. ``schedule`` says which stages
    of this GPT lie here, ``policies`` what is recomputed of each layer where the plan leaves it open,
    ``kernels`` which implementations the local operations take.
    """
    import torch

    from gridtron.conf.plugins import load_builder
    from gridtron.models.gpt import GPT

    dtype = parameter_dtype(plan.precision.mode, grid.device)
    if not is_own_model(plan):
        torch.manual_seed(plan.train.seed)
        model = (build or load_builder(plan.model.build or ""))(plan.model, grid)
        named = plan.parts.get("model") or plan.model.build
        if fault := model_fault(model):
            raise JobError(f"{named}: {fault}", agreed=True)
        if fault := stages_fault(model, schedule, grid.pipeline.rank):
            raise JobError(f"{named}: {fault}")
        return model.to(device=grid.device, dtype=dtype)
    check_memory(plan, grid)
    model = GPT(
        plan.model,
        grid,
        placement=None if schedule is None else schedule.placement,
        layers_per_stage=None if schedule is None else plan.pipeline.layers_per_stage,
        sequence_length=plan.train.sequence_length,
        seed=plan.train.seed,
        sequence_parallel=plan.grid.sequence_parallel,
        overlap=plan.grid.overlap,
        kernels=kernels,
        recompute=plan.recompute,
        policies=policies,
        device=grid.device,
        dtype=dtype,
    )
    if plan.train.compile:
        from gridtron.models.compiled import compile_layers

        compile_layers(model)
    return model


def check_memory(plan: Plan, grid: Grid) -> None:
    """Refuses a model whose states alone are larger than a device, before memory is asked for.

    Counts weights, gradients and optimizer states of one rank: a lower bound, so that nothing that fits is refused.

    Raises:
        JobError: they are larger, with the numbers.
    """
    import torch

    from gridtron.core.precision import wide_dtype
    from gridtron.models.cost.parameters import total_parameters

    dtype = parameter_dtype(plan.precision.mode, grid.device)
    wide = wide_dtype(dtype)
    # Momentum of SGD or Muon, where there is any, is at least none.
    states = 2 if "optimizer" not in plan.parts and plan.optimizer.name == "adamw" else 0
    zero = plan.data_parallel.zero
    shards = (plan.data_parallel.shard_size or grid.axis("data", "context").size) if zero else 1
    weights = dtype.itemsize if zero < 3 else wide.itemsize / shards
    gradients = wide.itemsize / (shards if zero > 1 else 1)
    main = wide.itemsize / shards if wide != dtype and zero < 3 else 0
    each = weights + gradients + main + wide.itemsize * states / shards
    parameters = total_parameters(plan.model)
    needed = parameters * each / (grid.tensor.size * grid.pipeline.size)
    if grid.device.type == "cuda":
        available = torch.cuda.get_device_properties(grid.device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise JobError(
            f"this model has {parameters:,} parameters: with gradients and optimizer states a rank holds "
            f"{needed / 2**30:,.0f} GiB at grid.tensor={grid.tensor.size}, grid.pipeline={grid.pipeline.size} and "
            f"data_parallel.zero={zero}, and {grid.device} has {available / 2**30:,.0f} GiB; choose a smaller model, "
            "more tensor or pipeline ranks on more machines, or data_parallel.zero=3 over more data ranks",
            agreed=True,
        )


def model_fault(model: Any) -> str | None:
    """Why what a user's builder gave cannot be trained; None where it can."""
    from torch import nn

    if not isinstance(model, nn.Module):
        return f"the builder gave a {type(model).__name__}; it returns an nn.Module"
    signature = inspect.signature(model.forward)
    try:
        signature.bind(None, None)
    except TypeError:
        return f"{type(model).__name__}.forward{signature} cannot be called as forward(tokens, targets)"
    return None


def stages_fault(model: Any, schedule: Schedule | None, rank: int) -> str | None:
    """Why a user's model cannot run over the pipeline axis; None where it can, or where there is none."""
    if schedule is None:
        return None
    stages, here = getattr(model, "stages", None), list(schedule.stages(rank))
    if isinstance(stages, Mapping) and sorted(stages) == here:
        return None
    found = f"its stages are {sorted(stages)}" if isinstance(stages, Mapping) else f"{type(model).__name__} has none"
    return (
        f"grid.pipeline={schedule.ranks} with the schedule {schedule.name} runs stages {here} on pipeline rank {rank}, "
        f"and {found}; give it an attribute stages={{stage: module}} of those, or set grid.pipeline=1"
    )


def build_data(
    plan: Plan, grid: Grid, build: Callable[..., Any] | None = None
) -> tuple[TrainingStream, EvaluationStream | None, dict[str, Any]]:
    """This data rank's streams, and the facts of the data for environment.json.

    A plugin's builder gives a sample source, or a pair of them: for training and held out (or None).
    """
    from gridtron.core.data.dataset import open_parts
    from gridtron.core.data.prepare import default_cache_folder, prepare_data
    from gridtron.core.data.stream import EvaluationStream, TrainingStream

    held_out: SampleSource | None
    if build is not None:
        made = build(plan.data, grid)
        source, held_out = made if isinstance(made, tuple) else (made, None)
        facts: dict[str, Any] = {"data": {"plugin": plan.parts["data"]}}
    else:
        prepared = prepare_data(plan.data, default_cache_folder(os.environ), None if grid.rank == 0 else False)
        vocabulary = getattr(plan.model, "vocab_size", None) or prepared.vocab_size
        parts = open_parts(prepared, plan.data, plan.train.sequence_length, vocabulary, plan.evaluation.every > 0)
        parts.training.check_start()
        source, held_out = parts.training, parts.held_out
        facts = {"data": prepared.report()}
    axis = grid.axis("data", "context")
    shape = (plan.train.global_batch_size, plan.train.micro_batch_size)
    training = TrainingStream(source, plan.train.seed, *shape, axis.rank, axis.size)
    evaluation = None
    if plan.evaluation.every and held_out is not None:
        evaluation = EvaluationStream(held_out, *shape, plan.evaluation.steps, axis.rank, axis.size)
    return training, evaluation, facts
