"""The whole model over pipelines: rule 1 in float64 for every schedule, with every other axis and mode pairwise."""

from dataclasses import replace

import pytest
from parity import FAMILIES, hold, pairwise_params

from gridtron.core.optim.config import OptimizerConfig
from gridtron.parallel.pipeline.build import FAMILIES as SCHEDULES


def check(family, layers, bound=1e-10, shape=None, **options):
    hold(replace(FAMILIES[family], num_layers=layers, **(shape or {})), bound, **options)


@pytest.mark.sample(7)
@pytest.mark.case(2, 17, 27)
@pytest.mark.parametrize("pipeline", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule, pipeline):
    """Tied embeddings, a layer count that does not divide, uneven tokens, a bound on the norm that bites."""
    stages = pipeline * SCHEDULES[schedule].chunks
    optimizer = OptimizerConfig("sgd", lr=0.1, grad_clip=0.05, weight_decay=0.0)
    grid = {"pipeline": pipeline}
    check("gpt2", stages + 1, grid=grid, schedule=schedule, micro_batch_size=1, steps=2, optimizer=optimizer)


def pairwise_cases(seed=20261203):
    """Every pair of values of two options occurs in some case: a greedy cover from a printed seed."""
    options = {
        "family": list(FAMILIES),
        "schedule": list(SCHEDULES),
        "sizes": [(2, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1), (3, 2, 1), (2, 2, 2)],
        "sequence_parallel": [False, True],
        "micro_batch_size": [1, 2, 4],
        "recompute": ["none", "selective", "full"],
        "dropout": [0.0, 0.1],
        "bucket_bytes": [64, 1 << 20],
        "extra_layers": [0, 1, 2],
    }
    return pairwise_params(options, seed, every=6)


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", pairwise_cases())
def test_pairwise(case):
    case = dict(case)
    pipeline, tensor, data = case.pop("sizes")
    dropout = case.pop("dropout")
    layers = pipeline * SCHEDULES[case["schedule"]].chunks + case.pop("extra_layers")
    shape = {"dropout": dropout, "attention_dropout": dropout}
    grid = {"pipeline": pipeline, "tensor": tensor, "data": data}
    check(case.pop("family"), layers, grid=grid, shape=shape, **case)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.slow) for name in FAMILIES]
)
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_twenty_steps_of_adamw(family, schedule):
    # AdamW divides the rounding of gradients that are truly zero (key biases) by its eps: the rate scales that noise.
    optimizer = OptimizerConfig("adamw", lr=5e-3, grad_clip=0.5)
    grid = {"pipeline": 2, "data": 2}
    check(family, 5, 1e-8, grid=grid, schedule=schedule, micro_batch_size=2, steps=20, optimizer=optimizer)


@pytest.mark.parametrize(("schedule", "layers"), [("1f1b", (4, 1)), ("zb_v", (1, 2, 1, 1))])
def test_layers_as_given(schedule, layers):
    grid = {"pipeline": 2}
    check("qwen", 5, grid=grid, schedule=schedule, layers_per_stage=layers, micro_batch_size=2)


def test_no_token_that_counts():
    check("llama", 3, grid={"pipeline": 2}, schedule="zb_h1", masks="none", micro_batch_size=2)
