"""Numbers of parameters, as pure functions of the shape."""

from __future__ import annotations

from gridtron.models.config import GPTConfig


def norm_parameters(config: GPTConfig) -> int:
    """Of one norm: a weight, and a bias for LayerNorm with biases."""
    return config.hidden_size * (2 if config.normalization == "layer_norm" and config.bias else 1)


def attention_matrix_parameters(config: GPTConfig) -> int:
    """Of q, k, v and the output projection, without biases: h d (2 heads + 2 kv_heads)."""
    return config.hidden_size * config.head_size * 2 * (config.num_attention_heads + config.kv_heads)


def mlp_matrix_parameters(config: GPTConfig) -> int:
    """Of the MLP, without biases: 3 h f gated (Shazeer 2020, arXiv:2002.05202), else 2 h f."""
    return (3 if config.activation == "swiglu" else 2) * config.hidden_size * config.ffn_size


def layer_parameters(config: GPTConfig) -> int:
    """Of one decoder layer: both branches, their biases and norms."""
    width, ffn = config.head_size, config.ffn_size
    total = attention_matrix_parameters(config) + mlp_matrix_parameters(config) + 2 * norm_parameters(config)
    if config.projection_bias:
        total += width * (config.num_attention_heads + 2 * config.kv_heads)
    if config.bias:
        total += config.hidden_size + (2 * ffn if config.activation == "swiglu" else ffn) + config.hidden_size
    return total


def embedding_parameters(config: GPTConfig) -> int:
    """Of the token embedding, and of learned positions."""
    assert config.vocab_size is not None
    positions = config.max_position_embeddings if config.position == "learned" else 0
    return (config.vocab_size + positions) * config.hidden_size


def head_parameters(config: GPTConfig) -> int:
    """Of the head, 0 where it is the embedding."""
    assert config.vocab_size is not None
    return 0 if config.tie_embeddings else config.vocab_size * config.hidden_size


def total_parameters(config: GPTConfig) -> int:
    """Of the whole model, a tied weight once."""
    layers = config.num_layers * layer_parameters(config)
    return embedding_parameters(config) + layers + norm_parameters(config) + head_parameters(config)
