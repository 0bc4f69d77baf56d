"""Rules across groups: what no single option can tell. Pure functions of the plan and of what surrounds the run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from gridtron.conf.checkpoint_rules import checkpoint_violations
from gridtron.conf.pipeline_rules import schedule_violations
from gridtron.conf.recompute_rules import recompute_violations
from gridtron.conf.schema import Plan
from gridtron.conf.speed_rules import compile_violations, kernels_violations, overlap_violations
from gridtron.conf.values import Violation
from gridtron.core.capabilities import Capabilities, find_libraries, usable_cores
from gridtron.core.data.config import DataConfig
from gridtron.core.kernels.config import AVAILABLE, kernels_fault
from gridtron.core.layout import AXIS_NAMES, nearest_divisor, resolve_sizes
from gridtron.core.precision import loss_scale_fault
from gridtron.models.config import GPTConfig


def data_fault(config: DataConfig) -> str | None:
    """Why the files of ``config`` cannot be read; None where they can."""
    from gridtron.core.data.sources import DataError, find_source

    try:
        find_source(config.path)
    except DataError as fault:
        return str(fault)
    return None


def folder_fault(folder: str) -> str | None:
    """Why files cannot be written in ``folder`` (made where it is not there); None where they can."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        return f"{existing} is a file, not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written"
    return None


def compiler_fault(devices: int, environment: Mapping[str, str]) -> str | None:
    """Why torch.compile has nothing to make code with, on CUDA or, without devices, on the CPU; None where it has."""
    if devices:
        return None if find_spec("triton") else "on CUDA torch.compile needs Triton; install gridtron[triton]"
    # The one that torch takes: CXX of the environment, else g++.
    name = environment.get("CXX") or "g++"
    return None if shutil.which(name) else f"on a CPU torch.compile needs a C++ compiler, and {name} is not there"


@dataclass(frozen=True)
class Surroundings:
    """What the rules may know of the machine and of who started the command. All of it can be replaced in a test.

    Args:
        launched: processes that a launcher (torchrun, srun, mpirun) started; None where none did.
        cores: processor cores that this process may use.
        devices: CUDA devices that this process may use.
        libraries: which kernels' libraries there are, and for what.
        compiler_fault: why torch.compile has nothing to compile with; None where it has.
        data_fault, folder_fault: see the functions of these names.
    """

    launched: int | None = None
    cores: int = 1
    devices: int = 0
    compiler_fault: str | None = None
    libraries: Capabilities = field(default_factory=lambda: find_libraries(0, {}), repr=False)
    data_fault: Callable[[DataConfig], str | None] = field(default=data_fault, repr=False)
    folder_fault: Callable[[str], str | None] = field(default=folder_fault, repr=False)

    @staticmethod
    def here(environment: Mapping[str, str], launched: int | None = None) -> Surroundings:
        """This machine's; ``environment`` is ``os.environ`` at an entry point. Does not import torch."""
        present = len(list(Path("/dev").glob("nvidia[0-9]*"))) if Path("/dev").is_dir() else 0
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            present = min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
        libraries = find_libraries(present, environment)
        return Surroundings(
            launched, usable_cores(), present, compiler_fault(present, environment), libraries=libraries
        )


def needed_processes(plan: Plan, launched: int | None = None) -> int:
    """How many processes a run has: what the launcher started, else ``launch.processes``, else what the grid needs.

    What the grid needs is the product of its axes, -1 taken as 1.
    """
    if launched is not None:
        return launched
    if isinstance(plan.launch.processes, int):
        return max(plan.launch.processes, 1)
    product = 1
    for name in AXIS_NAMES:
        product *= max(getattr(plan.grid, name), 1)
    return product


def check_rules(plan: Plan, surroundings: Surroundings) -> list[Violation]:
    """Every rule across groups that the plan breaks."""
    return [violation for rule in RULES for violation in rule(plan, surroundings)]


# ---------------------------------------------------------------- the grid and its processes
def processes_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    value = plan.launch.processes
    keys = {"launch.processes", *(f"grid.{name}" for name in AXIS_NAMES)}
    if value != "auto" and not (isinstance(value, int) and value >= 1):
        yield Violation(f"launch.processes={value}: must be auto or a whole number of at least 1; nearest: auto", keys)
        return
    if around.launched is not None:
        if isinstance(value, int) and value != around.launched:
            yield Violation(
                f"launch.processes={value}: the launcher started {around.launched} processes; nearest: auto", keys
            )
        return
    needed = needed_processes(plan)
    limit = around.devices or 2 * around.cores
    if value == "auto" and needed > limit:
        have = f"{around.devices} devices" if around.devices else f"{around.cores} cores (at most {limit} processes)"
        axes = " ".join(
            f"grid.{name}={getattr(plan.grid, name)}" for name in AXIS_NAMES if getattr(plan.grid, name) > 1
        )
        yield Violation(
            f"{axes}: needs {needed} processes, and this machine has {have}; start them on more machines by "
            f"`torchrun --nnodes N --nproc-per-node M -m gridtron train ...` (N x M = {needed}) or "
            f"`srun --ntasks {needed} gridtron train ...`, or insist by launch.processes={needed}",
            keys,
        )


def grid_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    keys = {"launch.processes", "grid.order", *(f"grid.{name}" for name in AXIS_NAMES)}
    zero = [name for name in AXIS_NAMES if getattr(plan.grid, name) == 0]
    for name in zero:
        yield Violation(f"grid.{name}=0: must be at least 1, or -1 for what is left; nearest: 1", keys)
    if zero or sizes_of(plan, around) is not None:
        return
    try:
        _resolve(plan, around)
    except ValueError as fault:
        yield Violation(f"grid: {fault}", keys)


def sizes_of(plan: Plan, around: Surroundings) -> Mapping[str, int] | None:
    """Sizes of the axes with -1 resolved; None where they do not fit (which ``grid_rule`` tells)."""
    try:
        return _resolve(plan, around)
    except ValueError:
        return None


def _resolve(plan: Plan, around: Surroundings) -> Mapping[str, int]:
    axes = {name: getattr(plan.grid, name) for name in AXIS_NAMES}
    return resolve_sizes(needed_processes(plan, around.launched), plan.grid.order, **axes).sizes


# ---------------------------------------------------------------- the model
def model_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    if _is_gpt(plan):
        for message in plan.model.violations():
            text = re.sub(r"(?<![\w.])(?=(?:num_|hidden_size|head_dim|rope_|rotary_fraction)\w*)", "model.", message)
            yield Violation(text, {f"model.{word}" for word in re.findall(r"model\.(\w+)", text)})
        if plan.model.vocab_size is None and not isinstance(plan.data, DataConfig):
            yield Violation(
                "model.vocab_size=null is the tokenizer's, and a plugin's data has none; "
                "set model.vocab_size to one more than the largest token",
                {"model.vocab_size"},
            )


def tensor_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    """A tensor rank without a query head, a column of the MLP or a row of the vocabulary would have nothing to do."""
    sizes = sizes_of(plan, around)
    if sizes is None or not _is_gpt(plan):
        return
    tensor, model = sizes["tensor"], plan.model
    limits = {
        f"model.num_attention_heads={model.num_attention_heads} query heads": model.num_attention_heads,
        f"model.ffn_hidden_size={model.ffn_size}": model.ffn_size,
    }
    if model.vocab_size is not None:
        limits[f"model.vocab_size={model.vocab_size}"] = model.vocab_size
    exceeded = {name: limit for name, limit in limits.items() if tensor > limit}
    if exceeded:
        named = " and ".join(exceeded)
        yield Violation(
            f"grid.tensor={tensor}: more tensor ranks than {named} can use; "
            f"nearest: grid.tensor={min(exceeded.values())}",
            {"grid.tensor", *(name.partition("=")[0] for name in exceeded)},
        )


def sequence_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    length = plan.train.sequence_length
    sizes = sizes_of(plan, around)
    tensor = sizes["tensor"] if sizes else 1
    if plan.grid.sequence_parallel and length % tensor:
        lower = length // tensor * tensor
        lengths = f"{lower} or {lower + tensor}" if lower else f"{tensor}"
        divisor = max(size for size in range(1, tensor + 1) if length % size == 0)
        yield Violation(
            f"train.sequence_length={length} is not a multiple of grid.tensor={tensor}, which sequence parallelism "
            f"needs; nearest: sequence_length {lengths}, tensor {divisor}, or grid.sequence_parallel=false",
            {"train.sequence_length", "grid.tensor", "grid.sequence_parallel"},
        )
    if _is_gpt(plan) and length > plan.model.max_position_embeddings:
        longest = plan.model.max_position_embeddings
        learned = plan.model.position == "learned"
        yield Violation(
            f"train.sequence_length={length}: {'learned positions end at' if learned else 'the longest sequence is'} "
            f"model.max_position_embeddings={longest}; nearest: train.sequence_length={longest}"
            + ("" if learned else f", or model.max_position_embeddings={length}"),
            {"train.sequence_length", "model.max_position_embeddings", "model.position"},
        )


def overlap_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    return overlap_violations(plan, around.devices)


def compile_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    sizes = sizes_of(plan, around)
    if sizes is not None:
        yield from compile_violations(plan, sizes, _is_gpt(plan), around.compiler_fault)


def kernels_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    if fault := kernels_fault(plan.kernels, around.libraries):
        yield Violation(fault, {f"kernels.{name}" for name in ("backend", *AVAILABLE)})
    yield from kernels_violations(plan, _is_gpt(plan))


# ---------------------------------------------------------------- the pipeline
def pipeline_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    sizes = sizes_of(plan, around)
    if sizes is not None:
        yield from schedule_violations(plan, sizes, _is_gpt(plan))


def recompute_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    sizes = sizes_of(plan, around)
    if sizes is not None:
        yield from recompute_violations(plan, sizes, _is_gpt(plan), around.devices)


# ---------------------------------------------------------------- data parallelism
def shard_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    size, zero, sizes = plan.data_parallel.shard_size, plan.data_parallel.zero, sizes_of(plan, around)
    if size is None or sizes is None:
        return
    keys = {"data_parallel.shard_size", "data_parallel.zero", "grid.data"}
    if zero == 0:
        yield Violation(
            f"data_parallel.shard_size={size}: cuts what data_parallel.zero=0 keeps whole on every rank; "
            "nearest: data_parallel.zero=1, or shard_size=null",
            keys,
        )
        return
    ranks = sizes["data"] * sizes["context"]
    if ranks % size:
        yield Violation(
            f"data_parallel.shard_size={size}: does not divide the {ranks} data ranks; "
            f"nearest: data_parallel.shard_size={nearest_divisor(ranks, size)}",
            keys,
        )


# ---------------------------------------------------------------- the batch and the run
def batch_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    sizes = sizes_of(plan, around)
    if sizes is None:
        return
    batch, micro, data = plan.train.global_batch_size, plan.train.micro_batch_size, sizes["data"]
    unit = micro * data
    if batch % unit == 0:
        return
    lower = batch // unit * unit
    batches = f"{lower} or {lower + unit}" if lower else f"{unit}"
    micros = [size for size in range(1, batch + 1) if batch % (size * data) == 0]
    nearest_micro = f", or micro_batch_size {min(micros, key=lambda size: abs(size - micro))}" if micros else ""
    yield Violation(
        f"train.global_batch_size={batch} is not a multiple of train.micro_batch_size={micro} x data={data} = {unit}; "
        f"nearest: global_batch_size {batches}{nearest_micro}",
        {"train.global_batch_size", "train.micro_batch_size", "grid.data"},
    )


def evaluation_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    held_out = getattr(plan.data, "held_out", None)
    if plan.evaluation.every and held_out == 0:
        yield Violation(
            f"evaluation.every={plan.evaluation.every}: data.held_out=0 keeps nothing to evaluate on; "
            "nearest: data.held_out=0.05, or evaluation.every=0",
            {"evaluation.every", "data.held_out"},
        )


def profile_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    value = plan.logging.profile
    found = re.fullmatch(r"(\d+):(\d+)", value) if value is not None else None
    if value is not None and not (found and 1 <= int(found[1]) <= int(found[2])):
        yield Violation(
            f"logging.profile={value}: write FIRST:LAST, two steps from 1 on, rising, as in logging.profile=10:12",
            {"logging.profile"},
        )


def folders_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    folders = {"run.directory": plan.run.directory or "runs", "data.directory": getattr(plan.data, "directory", None)}
    for key, folder in folders.items():
        if folder is not None and (fault := around.folder_fault(folder)):
            yield Violation(f"{key}={folder}: {fault}; make it writable, or set {key} to another folder", {key})


def data_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    if isinstance(plan.data, DataConfig) and (fault := around.data_fault(plan.data)):
        yield Violation(fault, {"data.path"})


def checkpoint_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    return checkpoint_violations(plan)


def precision_rule(plan: Plan, around: Surroundings) -> Iterator[Violation]:
    if fault := loss_scale_fault(plan.precision.loss_scale):
        yield Violation(f"precision.loss_scale={plan.precision.loss_scale:g}: {fault}", {"precision.loss_scale"})


RULES: tuple[Callable[[Plan, Surroundings], Iterable[Violation]], ...] = (
    processes_rule,
    grid_rule,
    model_rule,
    tensor_rule,
    sequence_rule,
    overlap_rule,
    compile_rule,
    kernels_rule,
    pipeline_rule,
    recompute_rule,
    shard_rule,
    batch_rule,
    precision_rule,
    evaluation_rule,
    profile_rule,
    folders_rule,
    data_rule,
    checkpoint_rule,
)


def _is_gpt(plan: Plan) -> bool:
    """Whether the model is this project's: a user's own has rules of its own."""
    return isinstance(plan.model, GPTConfig) and plan.model.build is None
