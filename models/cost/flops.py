"""Floating point operations of matrix products, as pure functions of the shape.

Conventions: a multiply and an add are two operations; attention counts the full square of the sequence (as the
products that run without a causal kernel, and as torch's FlopCounterMode counts them); the embedding's lookup counts
nothing and the head's product counts; recomputation is counted apart, so that utilisation is that of the model
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Of the real shape: gated or plain MLP of any width, grouped
key/value heads, tied or not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gridtron.models.config import GPTConfig
from gridtron.models.cost.parameters import attention_matrix_parameters, mlp_matrix_parameters
from gridtron.parallel.operations import kept_operators


def layer_forward_flops(config: GPTConfig, sequence_length: int) -> int:
    """Of one decoder layer, a token: 2 x its matrices, and q k^T and its product with v: 4 s heads d."""
    matrices = attention_matrix_parameters(config) + mlp_matrix_parameters(config)
    return 2 * matrices + 4 * sequence_length * config.num_attention_heads * config.head_size


def head_forward_flops(config: GPTConfig) -> int:
    """Of the head, a token: 2 V h, tied or not."""
    assert config.vocab_size is not None
    return 2 * config.vocab_size * config.hidden_size


def forward_flops(config: GPTConfig, sequence_length: int) -> int:
    """Of the whole model, a token."""
    return config.num_layers * layer_forward_flops(config, sequence_length) + head_forward_flops(config)


def backward_flops(config: GPTConfig, sequence_length: int) -> int:
    """Of the whole model's backward pass, a token: two products for each of the forward's."""
    return 2 * forward_flops(config, sequence_length)


def training_flops(config: GPTConfig, sequence_length: int) -> int:
    """Forward and backward, a token, without recomputation: 6 a parameter of a product, and attention."""
    return forward_flops(config, sequence_length) + backward_flops(config, sequence_length)


def layer_recomputed_flops(
    config: GPTConfig, sequence_length: int, policy: str, operations: Collection[str] = (), stops_early: bool = True
) -> int:
    """What one layer's backward pass runs again of its forward pass, a token.

    All of it, or the attention core, 4 s heads d (Korthikanti et al. 2022, arXiv:2205.05198, equation 8: there the
    model's 72 B L s h^2 (1 + s/6h) become (1 + s/3h)).

    Args:
        config: its shape.
        sequence_length: s.
        policy, operations: as :func:`gridtron.models.cost.activations.layer_activations` takes them.
        stops_early: a rerun ends once all that was kept is there again: a layer's, before its last product where that
            is not split over tensor ranks; an explicit attention core's, before its second. Not so where a schedule
            splits the backward pass.
    """
    core = 4 * sequence_length * config.num_attention_heads * config.head_size
    # Dropout after it keeps which samples it was given: the rerun goes on until there.
    last = 0 if config.dropout > 0 else 2 * config.ffn_size * config.hidden_size
    if policy == "selective":
        return core // 2 if stops_early and config.attention_dropout > 0 else core
    if policy == "full":
        return layer_forward_flops(config, sequence_length) - (last if stops_early else 0)
    if policy == "none":
        return 0
    kept = kept_operators(operations)
    attention = "aten.bmm" if config.attention_dropout > 0 else "aten._scaled_dot_product_flash_attention"
    biases = (config.projection_bias, config.bias, config.feed_forward_bias)
    projection, out, feed_forward = ("aten.addmm" if bias else "aten.mm" for bias in biases)
    width = config.head_size * config.hidden_size
    found = 0 if attention in kept else core
    if projection not in kept:
        found += 2 * width * (config.num_attention_heads + 2 * config.kv_heads)
    if out not in kept:
        found += 2 * width * config.num_attention_heads
    if feed_forward not in kept:
        found += 2 * mlp_matrix_parameters(config) - last * stops_early
    return found


def recomputed_flops(
    config: GPTConfig,
    sequence_length: int,
    policies: Sequence[str],
    operations: Collection[str] = (),
    stops_early: bool = True,
) -> int:
    """Of all layers, a token; ``policies`` has one for each."""
    return sum(layer_recomputed_flops(config, sequence_length, policy, operations, stops_early) for policy in policies)
