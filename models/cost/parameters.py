"""Numbers of parameters, as pure functions of the shape."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.models.config import GPTConfig
from gridtron.models.cost.activations import TensorShare


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
        total += config.hidden_size
    if config.feed_forward_bias:
        total += (2 * ffn if config.activation == "swiglu" else ffn) + config.hidden_size
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


@dataclass(frozen=True)
class ParameterCount:
    """Elements of parameters on one rank.

    Args:
        matrices: of hidden layers, two-dimensional: what Muon orthogonalises.
        others: embedding, positions, head, norms, biases.
    """

    matrices: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        return self.matrices + self.others

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(self.matrices + other.matrices, self.others + other.others)


def rank_layer_parameters(config: GPTConfig, share: TensorShare) -> ParameterCount:
    """Of one decoder layer on one rank of the tensor axis: q, k, v, gate and up by rows, the others by columns; norms
    and the biases of what is summed are whole (Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""
    hidden, heads = config.hidden_size, share.heads * config.head_size
    projected = heads + 2 * share.kv_heads * config.head_size
    columns = (2 if config.activation == "swiglu" else 1) * share.ffn
    matrices = hidden * (projected + heads + columns + share.ffn)
    others = 2 * norm_parameters(config)
    if config.projection_bias:
        others += projected
    if config.bias:
        others += hidden
    if config.feed_forward_bias:
        others += columns + hidden
    return ParameterCount(matrices, others)


def rank_root_parameters(config: GPTConfig, share: TensorShare, first: bool, last: bool) -> ParameterCount:
    """Beside the layers: embedding and positions on the first stage; final norm and head (or, tied, a copy of the
    embedding) on the last."""
    table = share.vocabulary * config.hidden_size
    positions = config.max_position_embeddings * config.hidden_size if config.position == "learned" else 0
    found = (table + positions if first else 0) + (norm_parameters(config) if last else 0)
    if last and not (first and config.tie_embeddings):
        found += table
    return ParameterCount(others=found)
