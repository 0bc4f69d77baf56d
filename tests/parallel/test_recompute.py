"""Recomputation changes memory and nothing else: gradients to the bit, in every mode, with dropout."""

import math
from dataclasses import replace

import pytest
import torch
from parity import FAMILIES
from ranks import run_ranks
from torch.utils.flop_counter import FlopCounterMode

from gridtron.core import Grid
from gridtron.core.communication import Ledger
from gridtron.models import GPT
from gridtron.models.cost.flops import recomputed_flops, training_flops
from gridtron.parallel import SampleContext, activation_checkpoint
from gridtron.parallel.operations import KEPT, known_operations, operations_fault
from gridtron.parallel.recompute import RecomputeConfig, layer_policies

CHOICES = {
    "selective": RecomputeConfig("selective"),
    "full": RecomputeConfig("full"),
    "first layer": RecomputeConfig("full", 1),
    "elementwise": RecomputeConfig("selective", operations=[]),
    "attention": RecomputeConfig("selective", operations=["attention"]),
    "one operator": RecomputeConfig("selective", operations=["aten.mm"]),
    "reduction": RecomputeConfig("selective", operations=["reduction"]),
    "all": RecomputeConfig("selective", operations=list(KEPT)),
}


def step(config, recompute, grid=None, sequence_parallel=False, policies=None, dtype=torch.float32):
    """Losses and gradients of one step from equal weights."""
    model = GPT(
        config, grid, seed=3, recompute=recompute, policies=policies, sequence_parallel=sequence_parallel, dtype=dtype
    )
    tokens = torch.arange(48).view(2, 24) * 7 % config.vocab_size
    losses = model(tokens, tokens.flip(0), SampleContext(torch.tensor([5, 9])))
    losses.sum().backward()
    return [losses.detach(), *(parameter.grad for parameter in model.parameters())]


def dropped(family, rate):
    return replace(FAMILIES[family], dropout=rate, attention_dropout=rate)


@pytest.mark.sample(4)
@pytest.mark.case(23)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_gradients_are_equal_to_the_bit(family, rate):
    config = dropped(family, rate)
    for dtype in (torch.float32, torch.bfloat16) if rate else (torch.float64,):
        plain = step(config, None, dtype=dtype)
        for name, recompute in CHOICES.items():
            found = step(config, recompute, dtype=dtype)
            assert all(map(torch.equal, found, plain)), name


def test_a_policy_for_each_layer():
    config = replace(dropped("llama", 0.1), num_layers=4)
    plain = step(config, None)
    recompute = RecomputeConfig("selective", operations=["attention"])
    mixed = step(config, recompute, policies=("full", "none", "selective", "operations"))
    assert all(map(torch.equal, mixed, plain))
    with pytest.raises(ValueError, match="one of none, selective, operations, full for each of the 4 layers"):
        GPT(config, policies=("full",), device="meta")
    with pytest.raises(ValueError, match="auto is a choice by memory"):
        GPT(config, recompute=RecomputeConfig("auto", budget_bytes=1), device="meta")


def steps_on_a_rank(family, rate):
    equal = {}
    for sequence_parallel in (False, True):
        with Grid.create(tensor=2) as grid:
            config = dropped(family, rate)
            plain = step(config, None, grid, sequence_parallel)
            for name in ("selective", "full", "elementwise", "attention", "reduction"):
                recompute = CHOICES[name]
                with Ledger(grid) as ledger:
                    found = step(config, recompute, grid, sequence_parallel)
                equal[name, sequence_parallel] = all(map(torch.equal, found, plain))
                assert ledger.calls("tensor") > 0
    return equal


@pytest.mark.sample(2)
@pytest.mark.case(23)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_equal_to_the_bit_over_two_tensor_ranks(family):
    """A kept product is not summed over the ranks a second time."""
    for found in run_ranks(steps_on_a_rank, 2, family, 0.1):
        assert all(found.values()), [key for key, equal in found.items() if not equal]


def reductions_on_a_rank(operations):
    with Grid.create(tensor=2) as grid, Ledger(grid) as ledger:
        step(FAMILIES["llama"], RecomputeConfig("selective", operations=operations), grid)
        return ledger.calls("tensor", "all_reduce")


def test_kept_reductions_are_not_repeated():
    """Two layers with two reductions each are run again only where that is asked for."""
    (kept, _), (again, _) = (run_ranks(reductions_on_a_rank, 2, operations) for operations in ([], ["reduction"]))
    assert again - kept == 4


def fused_attention(products):
    """FLOPs of a fused attention operator for FlopCounterMode, which does not know the CPU's."""

    def count(*shapes, out_shape=None, **others):
        query = next(shape for shape in shapes if shape is not None)
        return products * 2 * math.prod(query) * query[-2]

    return count


FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused_attention(2),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: fused_attention(4),
}


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dropout", "attention_dropout"), [(0.0, 0.0), (0.0, 0.1), (0.1, 0.1)])
def test_recomputed_flops_are_those_counted(family, name, dropout, attention_dropout):
    config = replace(FAMILIES[family], dropout=dropout, attention_dropout=attention_dropout)
    recompute = CHOICES[name]
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        step(config, recompute)
    policies = layer_policies(recompute, config.num_layers)
    predicted = training_flops(config, 24) + recomputed_flops(config, 24, policies, recompute.operations or ())
    assert counter.get_total_flops() == pytest.approx(48 * predicted, rel=0.01)


def test_names_of_operations():
    assert operations_fault(known_operations()) is None
    assert operations_fault(["atention"]) == "'atention' is no operation of a layer; nearest: attention"
    for name in known_operations():
        space, _, operator = name.partition(".")
        if operator:
            assert hasattr(getattr(torch.ops, space), operator), name
    with pytest.raises(ValueError, match=r"nearest: aten\.mm"):
        activation_checkpoint(torch.relu, torch.ones(1), policy=["aten.mmm"])
    with pytest.raises(ValueError, match="or a list of operations"):
        activation_checkpoint(torch.relu, torch.ones(1), policy="half")
