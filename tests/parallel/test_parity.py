"""A run does not depend on its grid: rule 1, in float64, over grids, families, microbatches, recomputation, dropout."""

from dataclasses import replace

import pytest
import torch
from parity import FAMILIES, Case, hold, pairwise_params, run_case
from ranks import run_ranks

from gridtron.core.optim.config import OptimizerConfig


def check(family, *, bound=1e-10, dropout=0.0, shape=None, **options):
    config = replace(FAMILIES[family], dropout=dropout, attention_dropout=dropout, **(shape or {}))
    hold(config, bound, **options)


@pytest.mark.sample(12)
@pytest.mark.case(4, 5, 19, 21)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_and_sequence(family, tensor, sequence_parallel):
    check(family, grid={"tensor": tensor}, sequence_parallel=sequence_parallel, dropout=0.1)


@pytest.mark.case(1)
@pytest.mark.parametrize(("data", "micro"), [(1, 1), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1)])
def test_uneven_tokens_over_data_and_microbatches(data, micro):
    check("llama", grid={"data": data}, micro_batch_size=micro, dropout=0.1)


def pairwise_cases(seed=20261130):
    """Every pair of values of two options occurs in some case: a greedy cover from a printed seed."""
    options = {
        "family": list(FAMILIES),
        "sizes": [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (2, 4), (3, 1), (3, 2), (4, 2)],
        "sequence_parallel": [False, True],
        "micro_batch_size": [1, 2],
        "recompute": ["none", "selective", "full"],
        "dropout": [0.0, 0.1],
        "bucket_bytes": [64, 1 << 20],
        "masks": ["uneven", "all"],
    }
    return pairwise_params(options, seed, every=6)


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", pairwise_cases())
def test_pairwise(case):
    case = dict(case)
    tensor, data = case.pop("sizes")
    check(case.pop("family"), grid={"tensor": tensor, "data": data}, **case)


@pytest.mark.parametrize(
    ("family", "tensor", "data", "sequence_parallel", "recompute"),
    [
        ("llama", 2, 2, True, "full"),
        pytest.param("gpt2", 4, 2, False, "selective", marks=pytest.mark.slow),
        pytest.param("qwen", 3, 2, True, "none", marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_of_adamw(family, tensor, data, sequence_parallel, recompute):
    check(
        family,
        bound=1e-8,
        grid={"tensor": tensor, "data": data},
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        micro_batch_size=2,
        dropout=0.1,
        steps=20,
        optimizer=OptimizerConfig("adamw", lr=1e-3, grad_clip=1.0, weight_decay=0.1),
    )


@pytest.mark.sample(5)
@pytest.mark.case(19)
@pytest.mark.parametrize(
    ("shape", "tensor"),
    [
        ({"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 56}, 4),
        ({"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 56}, 8),
        ({"num_attention_heads": 7, "num_key_value_heads": 7, "hidden_size": 28}, 3),
        ({"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 28}, 4),
        ({"num_attention_heads": 6, "num_key_value_heads": 4 - 1, "hidden_size": 24}, 4),
    ],
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_heads_that_do_not_divide(shape, tensor, sequence_parallel):
    """Qwen2.5-0.5B's heads at tensor 4, 7B's at tensor 8, odd numbers elsewhere: uneven shares, shared KV heads."""
    check("qwen", grid={"tensor": tensor}, sequence_parallel=sequence_parallel, shape=shape, dropout=0.1)


@pytest.mark.case(3)
@pytest.mark.parametrize("grid", [{}, {"tensor": 2}, {"data": 2}])
def test_a_step_without_tokens(grid):
    size = 2 if grid else 1
    optimizer = OptimizerConfig("adamw", lr=1e-3, weight_decay=0.0)
    for result in run_ranks(run_case, size, Case(grid=grid, masks="none", optimizer=optimizer)):
        assert result["losses"] == [0.0] and result["norms"] == [0.0]
        assert all(not tensor.any() for tensor in result["gradients"].values())
        assert all(torch.isfinite(tensor).all() for tensor in result["parameters"].values())
