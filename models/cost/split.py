"""What each layer, the embedding, and head and loss cost a pipeline stage, as pure functions of the shape.

In forward operations a token, beside the products that :mod:`gridtron.models.cost.flops` counts also those on single
elements where nothing else is done: they weigh little, but a stage with a vocabulary of 150,000 has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.models.config import GPTConfig
from gridtron.models.cost.flops import head_forward_flops, layer_forward_flops


@dataclass(frozen=True)
class SplitCosts:
    """Forward operations a token.

    Args:
        layers: of each decoder layer.
        embedding: of the first stage beside its layers.
        head: of the last stage beside its layers: final norm, head, loss.
    """

    layers: tuple[int, ...]
    embedding: int
    head: int


def split_costs(config: GPTConfig, sequence_length: int) -> SplitCosts:
    """Costs by which layers are balanced over stages.

    A backward pass costs twice the forward's products in each of them alike, so that proportions hold for both.
    """
    layer = layer_forward_flops(config, sequence_length)
    head = head_forward_flops(config) + loss_forward_operations(config) + norm_forward_operations(config)
    return SplitCosts((layer,) * config.num_layers, embedding_forward_operations(config), head)


def embedding_forward_operations(config: GPTConfig) -> int:
    """A token: a row of h copied, and one of h added where positions are learned."""
    return config.hidden_size * (2 if config.position == "learned" else 1)


def loss_forward_operations(config: GPTConfig) -> int:
    """A token: max, subtraction, exponential and sum over V logits: 4 V (softmax cross-entropy, its definition)."""
    assert config.vocab_size is not None
    return 4 * config.vocab_size


def norm_forward_operations(config: GPTConfig) -> int:
    """A token: square, sum, scale and weight over h for RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4),
    and mean, subtraction and bias for LayerNorm (Ba et al. 2016, arXiv:1607.06450, eq. 4)."""
    return config.hidden_size * (7 if config.normalization == "layer_norm" else 4)
