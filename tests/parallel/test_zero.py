"""A run does not depend on its ZeRO stage: rule 1 in float64, with every other axis and mode pairwise."""

import itertools
from dataclasses import replace

import pytest
from parity import FAMILIES, hold, pairwise_params

from gridtron.core.optim.config import OptimizerConfig

ADAMW = OptimizerConfig("adamw", lr=1e-3, grad_clip=1.0, weight_decay=0.1)
MUON = OptimizerConfig("muon", lr=1e-3, grad_clip=1.0, weight_decay=0.1, momentum=0.9)


def check(family, layers, bound=1e-10, **options):
    hold(replace(FAMILIES[family], num_layers=layers), bound, **options)


def pairwise_cases(seed=20261130):
    options = {
        "family": list(FAMILIES),
        "zero": [1, 2, 3],
        # data, tensor, pipeline
        "sizes": [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)],
        "schedule": ["1f1b", "zb_h1", "zb_v", "interleaved_1f1b"],
        "reduce": [None, "each", "last"],
        "micro_batch_size": [1, 2],
        "recompute": ["none", "selective", "full"],
        "bucket_bytes": [64, 4096],
        "masks": ["uneven", "one_rank"],
        "frozen": [(), ("final_norm", "embedding", "blocks.0.")],
        "sequence_parallel": [False, True],
    }
    return pairwise_params(options, seed, every=12)


@pytest.mark.case(7, 28)
@pytest.mark.parametrize("case", pairwise_cases())
def test_pairwise(case):
    case = dict(case)
    data, tensor, pipeline = case.pop("sizes")
    if pipeline == 1:
        case["schedule"] = None
    check(case.pop("family"), 5, grid={"data": data, "tensor": tensor, "pipeline": pipeline}, steps=2, **case)


TENSOR, PIPELINE = {"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2}
IN_MAKE_TEST = {(2, "muon", "zb_v")}


def twenty_steps():
    """Every combination; those that are not among the chosen ones run in make test-all."""
    for zero, optimizer, (grid, schedule) in itertools.product(
        (1, 2, 3), (ADAMW, MUON), ((TENSOR, None), (PIPELINE, "zb_v"))
    ):
        marks = () if (zero, optimizer.name, schedule) in IN_MAKE_TEST else pytest.mark.slow
        yield pytest.param(zero, optimizer, grid, schedule, marks=marks, id=f"{zero}-{optimizer.name}-{schedule}")


@pytest.mark.parametrize(("zero", "optimizer", "grid", "schedule"), list(twenty_steps()))
def test_twenty_steps(zero, optimizer, grid, schedule):
    family = "qwen" if schedule is None else "gpt2"
    check(family, 4, 1e-8, grid=grid, schedule=schedule, zero=zero, micro_batch_size=2, steps=20, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [{"tensor": 2}, {"pipeline": 2}, {"data": 4}], ids=str)
def test_twenty_steps_of_muon_without_zero(grid):
    schedule = "1f1b" if "pipeline" in grid else None
    check("llama", 3, 1e-8, grid=grid, schedule=schedule, micro_batch_size=2, steps=20, optimizer=MUON)


@pytest.mark.sample(3)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"reduce": "each"}, pytest.param({"schedule": "zb_h1"}, marks=pytest.mark.slow)], ids=str
)
def test_hybrid_sharding(zero, options):
    grid = {"data": 4, "pipeline": 2} if "schedule" in options else {"data": 4}
    options = {"micro_batch_size": 2, **options}
    check("gpt2", 3, grid=grid, zero=zero, shard_size=2, steps=2, **options)


@pytest.mark.sample(1)
@pytest.mark.case(28)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_more_ranks_than_rows(zero):
    """Five data ranks, KV heads on several of four tensor ranks: uneven and empty ranges of rows held twice."""
    check(
        "llama",
        1,
        grid={"data": 2, "tensor": 4},
        zero=zero,
        bucket_bytes=64,
        optimizer=replace(ADAMW, grad_clip=0.1),
        bound=1e-8,
    )
    check("gpt2", 1, grid={"data": 5}, zero=zero, global_batch_size=10, micro_batch_size=1, bucket_bytes=64)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_with_nothing_trainable(zero):
    grid = {"data": 2, "pipeline": 2}
    check(
        "llama",
        2,
        grid=grid,
        schedule="1f1b",
        layers_per_stage=(1, 1),
        zero=zero,
        micro_batch_size=2,
        frozen=("embedding", "blocks.0."),
    )


@pytest.mark.parametrize("zero", [0, 3])
def test_nothing_trainable_at_all(zero):
    check("llama", 1, grid={"data": 2}, zero=zero, micro_batch_size=2, frozen=("",))


@pytest.mark.parametrize("zero", [2, 3])
def test_no_token_that_counts(zero):
    check("gpt2", 2, grid={"data": 2}, zero=zero, micro_batch_size=2, masks="none")
