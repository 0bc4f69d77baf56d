"""Floating point operations of matrix products, as pure functions of the shape.

Conventions: a multiply and an add are two operations; attention counts the full square of the sequence (as the
products that run without a causal kernel, and as torch's FlopCounterMode counts them); the embedding's lookup counts
nothing and the head's product counts; recomputation counts nothing, so that utilisation is that of the model
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Of the real shape: gated or plain MLP of any width, grouped
key/value heads, tied or not.
"""

from __future__ import annotations

from gridtron.models.config import GPTConfig
from gridtron.models.cost.parameters import attention_matrix_parameters, mlp_matrix_parameters


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


def training_flops(config: GPTConfig, sequence_length: int) -> int:
    """Forward and backward, a token: the backward pass has two products for each of the forward's."""
    return 3 * forward_flops(config, sequence_length)
