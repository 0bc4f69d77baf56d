"""The dense reference: any grid's loss, gradients and training against one plain process, in float64.

The error of a tensor is max|a-b| / max(max|b|, 1e-3 s), s the largest absolute entry over all of the model's tensors.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor

from gridtron.core import Grid
from gridtron.core.data.batch import Batch
from gridtron.core.kernels.config import KernelsConfig
from gridtron.core.optim.config import OptimizerConfig
from gridtron.core.precision import LossScaler
from gridtron.models import GPT, GPTConfig
from gridtron.parallel import full_state_dict
from gridtron.parallel.data_parallel.config import DataParallelConfig
from gridtron.parallel.data_parallel.fsdp import whole_rows
from gridtron.parallel.engine import TrainingEngine
from gridtron.parallel.pipeline import build_schedule
from gridtron.parallel.recompute import RecomputeConfig

LLAMA = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    ffn_hidden_size=11,
    vocab_size=101,
    max_position_embeddings=64,
    init_std=0.3,
)
GPT2 = replace(
    LLAMA,
    num_key_value_heads=None,
    normalization="layer_norm",
    position="learned",
    activation="gelu_tanh",
    bias=True,
    tie_embeddings=True,
)
NEOX = replace(
    LLAMA,
    num_key_value_heads=None,
    normalization="layer_norm",
    activation="gelu",
    bias=True,
    parallel_residual=True,
    rotary_fraction=0.5,
)
FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "qwen": replace(LLAMA, qkv_bias=True, tie_embeddings=True), "neox": NEOX}


@dataclass(frozen=True)
class Case:
    """One run of the harness. ``grid`` are Grid.create's sizes; every other field must not change the numbers."""

    config: GPTConfig = LLAMA
    grid: Mapping[str, int] = field(default_factory=dict)
    sequence_parallel: bool = False
    micro_batch_size: int = 4
    recompute: str = "none"
    bucket_bytes: int = 4096
    zero: int = 0
    shard_size: int | None = None
    reduce: str | None = None
    schedule: str | None = None
    chunks: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    overlap: str = "none"
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    # What may change the numbers:
    global_batch_size: int = 8
    sequence_length: int = 24
    steps: int = 1
    optimizer: OptimizerConfig = OptimizerConfig("sgd", lr=0.1, grad_clip=0.0, weight_decay=0.0)
    masks: str = "uneven"
    frozen: tuple[str, ...] = ()

    def plain(self) -> Case:
        """The same run in one plain process, in one microbatch."""
        return replace(
            self,
            grid={},
            sequence_parallel=False,
            micro_batch_size=self.global_batch_size,
            recompute="none",
            bucket_bytes=4096,
            zero=0,
            shard_size=None,
            reduce=None,
            schedule=None,
            chunks=None,
            layers_per_stage=None,
            overlap="none",
            kernels=KernelsConfig(),
        )


def global_batch(case: Case, step: int) -> Batch:
    """The same samples whatever the grid; very uneven counts of supervised tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (case.global_batch_size, case.sequence_length)
    vocabulary = case.config.vocab_size or 0
    tokens, targets = (torch.randint(0, vocabulary, shape, generator=generator) for _ in range(2))
    if case.masks == "uneven":
        for row in range(shape[0]):
            targets[row, : row * shape[1] // shape[0]] = -100
        targets[0, : shape[1] - 1] = -100
    elif case.masks == "one_rank":
        targets[: shape[0] // 2] = -100
    elif case.masks == "none":
        targets[:] = -100
    return Batch.of(tokens, targets, torch.arange(shape[0]) + step * shape[0])


def split(batch: Batch, parts: int) -> list[Batch]:
    columns = [getattr(batch, name).chunk(parts) for name in batch.__dataclass_fields__]
    return [Batch(*pieces) for pieces in zip(*columns, strict=True)]


def count_of(case: Case, grid: Grid) -> int:
    """Microbatches of a step on each data rank."""
    return max(1, case.global_batch_size // grid.data.size // case.micro_batch_size)


def microbatches_of(case: Case, grid: Grid, step: int) -> list[Batch]:
    """This data rank's part of a step."""
    own = split(global_batch(case, step), grid.data.size)[grid.data.rank]
    return split(own, count_of(case, grid))


def build_engine(
    case: Case,
    grid: Grid,
    dtype: torch.dtype = torch.float64,
    scaler: LossScaler | None = None,
    seed: int = 7,
    grad_norms: str | None = None,
    recompute: RecomputeConfig | None = None,
) -> TrainingEngine:
    """The engine that trains ``case`` on this rank, in any number format."""
    stages: dict[str, Any] = {}
    schedule = None
    if case.schedule is not None:
        schedule = build_schedule(case.schedule, grid.pipeline.size, count_of(case, grid), case.chunks)
        stages = {"num_stages": schedule.num_stages, "placement": schedule.placement}
    model = GPT(
        case.config,
        grid,
        **stages,
        layers_per_stage=case.layers_per_stage,
        seed=seed,
        sequence_parallel=case.sequence_parallel,
        overlap=case.overlap,
        kernels=case.kernels,
        recompute=recompute or RecomputeConfig(case.recompute),
        dtype=dtype,
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(case.frozen) if case.frozen else True)
    options = DataParallelConfig(case.zero, case.bucket_bytes, case.shard_size, case.reduce)
    return TrainingEngine(
        model,
        grid,
        case.optimizer,
        options,
        schedule=schedule,
        loss_scaler=scaler,
        grad_norms=grad_norms,
        adamw=case.kernels.of("adamw"),
    )


def run_case(case: Case) -> dict[str, Any]:
    """Losses, norms, gradients of the first step, parameters after the last, on this rank of the case's grid."""
    with Grid.create(**case.grid) as grid:
        engine = build_engine(case, grid, grad_norms="layer" if case.steps <= 2 else None)
        model = engine.model
        result: dict[str, Any] = {"initial": full_state_dict(model, grid), "losses": [], "norms": [], "layer_norms": []}
        for step in range(case.steps):
            outcome = engine.forward_backward(microbatches_of(case, grid, step))
            if step == 0:
                result["gradients"] = full_state_dict(model, grid, of="gradients")
            norm = engine.step(case.optimizer.lr)
            result["losses"].append(outcome.loss)
            result["norms"].append(norm.grad_norm)
            result["layer_norms"].append(norm.grad_norms or {})
        result["parameters"] = full_state_dict(model, grid)
        # What several ranks hold whole, and what two stages hold twice, must stay equal.
        result["replicas"] = {
            (item.name, None if item.sharding.dim is None else item.axis.rank): whole_rows(item.parameter).clone()
            for item in engine.parameters
            if item.sharding.dim is None or item.copies is not None
        }
        own = split(global_batch(case, case.steps - 1), grid.data.size)[grid.data.rank]
        result["evaluation"] = engine.evaluate(split(own, 2)).loss
        return result


_REFERENCES: dict[str, dict[str, Any]] = {}


def hold(config: GPTConfig, bound: float = 1e-10, run: Callable[[Case], Any] = run_case, **options: Any) -> None:
    """Runs a case on all ranks of its grid: each of them has what one plain process has, and replicas are equal.

    ``run`` is run_case, or a test's own that calls it in other surroundings.
    """
    case = Case(config=config, **options)
    plain = case.plain()
    if repr(plain) not in _REFERENCES:
        _REFERENCES[repr(plain)] = run_case(plain)
    reference = _REFERENCES[repr(plain)]
    results = run_ranks(run, math.prod(case.grid.values()), case)
    held = {key: tensor for result in results for key, tensor in result["replicas"].items()}
    for result in results:
        assert_parity(result, reference, bound)
        assert abs(result["evaluation"] - reference["evaluation"]) < bound
        assert all(torch.equal(tensor, held[key]) for key, tensor in result["replicas"].items())


def pairwise(options: Mapping[str, list[Any]], seed: int) -> list[dict[str, Any]]:
    """Cases in which every pair of values of two options occurs: a greedy cover from a printed seed."""
    print(f"pairwise seed {seed}")
    generator = random.Random(seed)
    names = list(options)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in options[a] for y in options[b]}
    cases = []
    while missing:
        candidates = [{name: generator.choice(options[name]) for name in names} for _ in range(60)]
        gains = [{pair for pair in missing if all(case[n] == value for n, value in pair)} for case in candidates]
        best = max(range(len(candidates)), key=lambda index: len(gains[index]))
        if gains[best]:
            missing -= gains[best]
            cases.append(candidates[best])
    return cases


def pairwise_params(options: Mapping[str, list[Any]], seed: int, every: int) -> list[Any]:
    """Those cases for pytest.mark.parametrize: one of ``every`` runs in make test, the others in make test-all."""
    import pytest

    return [
        pytest.param(case, marks=pytest.mark.slow if number % every else (), id="-".join(map(str, case.values())))
        for number, case in enumerate(pairwise(options, seed))
    ]


def worst_error(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest error over all tensors, by rule 1, and whose it is."""
    assert tensors.keys() == reference.keys(), tensors.keys() ^ reference.keys()
    scale = max(float(tensor.abs().max()) for tensor in reference.values() if tensor.numel())
    errors = [
        (float((tensors[name] - b).abs().max()) / max(float(b.abs().max()), 1e-3 * scale, 1e-300), name)
        for name, b in reference.items()
        if b.numel()
    ]
    return max(errors)


def assert_parity(result: Mapping[str, Any], reference: Mapping[str, Any], bound: float) -> None:
    """Initial weights to the bit; losses, norms, gradients and parameters within ``bound``."""
    for name, tensor in reference["initial"].items():
        assert torch.equal(result["initial"][name], tensor), f"initial weights of {name} depend on the grid"
    for kind in ("losses", "norms"):
        for a, b in zip(result[kind], reference[kind], strict=True):
            assert abs(a - b) <= bound * max(abs(b), 1e-6), (kind, a, b)
    for layers, expected in zip(result["layer_norms"], reference["layer_norms"], strict=True):
        assert layers.keys() == expected.keys()
        assert all(abs(layers[name] - norm) <= bound * max(norm, 1e-6) for name, norm in expected.items()), layers
    for kind in ("gradients", "parameters"):
        if reference[kind]:
            error, name = worst_error(result[kind], reference[kind])
            ratio = result[kind][name].norm() / reference[kind][name].norm()
            assert error < bound, f"{kind}: {name} differs by {error:.2e} (norms' ratio {ratio:.6f})"
