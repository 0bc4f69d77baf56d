"""Counts by formula against counts of the real thing."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import FAMILIES, LLAMA
from torch.utils.flop_counter import FlopCounterMode

from gridtron.conf.compose import compose
from gridtron.models import GPT, GPTConfig
from gridtron.models.cost.flops import forward_flops, layer_forward_flops, training_flops
from gridtron.models.cost.parameters import total_parameters
from gridtron.models.cost.split import split_costs, stage_costs

PUBLISHED = Path(__file__).parent.parent / "published" / "param_counts.csv"
PRESETS = {
    "GPT-2 124M": "gpt2_124m",
    "GPT-2 355M medium": "gpt2_355m",
    "GPT-2 774M large": "gpt2_774m",
    "GPT-2 1558M xl": "gpt2_1558m",
    "Llama-2-7B": "llama2_7b",
    "Llama-2-13B": "llama2_13b",
    "Llama-3/3.1-8B": "llama3_8b",
    "Llama-3/3.1-70B": "llama3_70b",
    "Llama-3.1-405B": "llama31_405b",
    "Qwen2.5-0.5B": "qwen25_0_5b",
    "Qwen2.5-7B": "qwen25_7b",
    "Qwen2.5-72B": "qwen25_72b",
    "GPT-3 Small": "gpt3_small",
    "GPT-3 175B": "gpt3_175b",
}


def published():
    with open(PUBLISHED, newline="") as file:
        return {row["model"]: int(row["computed_from_config"]) for row in csv.DictReader(file)}


def test_every_published_model_has_a_preset():
    assert published().keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_count_as_published(name):
    config = compose([f"model={PRESETS[name]}", "train.sequence_length=128"]).model
    model = GPT(config, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == published()[name]
    assert total_parameters(config) == published()[name]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes", [{}, {"bias": True}, {"qkv_bias": True}, {"mlp_bias": True}, {"activation": "relu"}, {"num_layers": 5}]
)
def test_parameters_of_odd_shapes(family, changes):
    config = replace(FAMILIES[family], **changes)
    assert sum(p.numel() for p in GPT(config, device="meta").parameters()) == total_parameters(config)


@pytest.mark.case(43)
@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=4,
            num_key_value_heads=1,
            ffn_hidden_size=11,
            vocab_size=101,
        ),
        replace(LLAMA, tie_embeddings=True),
        replace(LLAMA, ffn_hidden_size=64, num_key_value_heads=8),
        FAMILIES["gpt2"],
        replace(FAMILIES["gpt2"], ffn_hidden_size=7),
    ],
)
def test_flops_equal_counted_matmuls(config):
    """The full square of the sequence, as FlopCounterMode counts; attention with dropout is plain products."""
    model = GPT(replace(config, attention_dropout=0.5), seed=0)
    tokens = torch.randint(0, 101, (2, 24))
    with FlopCounterMode(display=False) as forward:
        losses = model(tokens, tokens)
    with FlopCounterMode(display=False) as backward:
        losses.sum().backward()
    count = tokens.numel()
    assert forward.get_total_flops() == pytest.approx(forward_flops(config, 24) * count, rel=0.01)
    total = forward.get_total_flops() + backward.get_total_flops()
    assert total == pytest.approx(training_flops(config, 24) * count, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_costs_of_the_split_add_up_to_the_whole(family):
    """Beside the products, the single elements' operations: a small part, unless the vocabulary is all there is."""
    config = replace(FAMILIES[family], hidden_size=512, ffn_hidden_size=2048, num_layers=5)
    costs = split_costs(config, 64)
    assert len(costs.layers) == 5 and len(set(costs.layers)) == 1
    products = forward_flops(config, 64)
    assert products < sum(costs.layers) + costs.embedding + costs.head < products * 1.001
    wide = split_costs(replace(config, vocab_size=50_000), 64)
    assert wide.layers == costs.layers and wide.embedding == costs.embedding
    assert wide.head - costs.head == (2 * 512 + 4) * (50_000 - 101)


@pytest.mark.parametrize("family", FAMILIES)
def test_costs_of_stages_are_those_of_the_whole(family):
    """The three passes together are the counted FLOPs, and what a recomputed layer adds is its forward pass."""
    config = replace(FAMILIES[family], hidden_size=512, ffn_hidden_size=2048, num_layers=5)
    whole, parts = stage_costs(config, [(0, 5)], 64), stage_costs(config, [(0, 1), (1, 4), (4, 5)], 64)
    for kind in ("forward", "input_grad", "weight_grad"):
        assert sum(getattr(parts, kind)) == sum(getattr(whole, kind))
    total = whole.forward[0] + whole.input_grad[0] + whole.weight_grad[0]
    assert training_flops(config, 64) < total < training_flops(config, 64) * 1.001
    layer = layer_forward_flops(config, 64)
    core = 4 * 64 * config.num_attention_heads * config.head_size
    for arguments, added in [(("full",), [1, 3, 1]), (("full", 2), [1, 2, 1]), (("full", 0), [0, 0, 0])]:
        again = stage_costs(config, [(0, 1), (1, 4), (4, 5)], 64, *arguments)
        assert [a - b for a, b in zip(again.input_grad, parts.input_grad, strict=True)] == [
            count * layer for count in added
        ]
    again = stage_costs(config, [(0, 1), (1, 4), (4, 5)], 64, "selective")
    assert [a - b for a, b in zip(again.input_grad, parts.input_grad, strict=True)] == [core, 3 * core, core]
