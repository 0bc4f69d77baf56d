"""What each layer, the embedding, and head and loss cost a pipeline stage, as pure functions of the shape.

In forward operations a token, beside the products that :mod:`gridtron.models.cost.flops` counts also those on single
elements where nothing else is done: they weigh little, but a stage with a vocabulary of 150,000 has them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gridtron.models.config import GPTConfig
from gridtron.models.cost.flops import head_forward_flops, layer_forward_flops, recomputed_flops
from gridtron.models.cost.parameters import attention_matrix_parameters, mlp_matrix_parameters
from gridtron.parallel.recompute import RecomputeConfig, layer_policies


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


@dataclass(frozen=True)
class StageCosts:
    """Operations a token of each stage's forward pass and of both halves of its backward pass."""

    forward: tuple[int, ...]
    input_grad: tuple[int, ...]
    weight_grad: tuple[int, ...]


def stage_costs(
    config: GPTConfig,
    ranges: Sequence[tuple[int, int]],
    sequence_length: int,
    recompute: str = "none",
    recompute_layers: int | None = None,
    policies: Sequence[str] | None = None,
    operations: Collection[str] = (),
) -> StageCosts:
    """What a schedule's F, I and W cost on each stage.

    A product with a weight has two products of its own size in the backward pass, one for the input and one for the
    weight; the two of attention have no weight, and both of each one's go to the inputs (Qi et al. 2023,
    arXiv:2401.10241, table 1: W is smaller than I). A recomputed layer's forward pass, or its attention core's, is run
    again at I.

    Args:
        config: its shape, with vocab_size.
        ranges: (start, stop) of each stage's layers.
        sequence_length: of a sample.
        recompute: "none", "selective" or "full".
        recompute_layers: of "full": the first so many layers of each stage; None: all.
        policies: of each layer of the model, in place of ``recompute``.
        operations: of layers whose policy is "operations".
    """
    costs = split_costs(config, sequence_length)
    weights = 2 * (attention_matrix_parameters(config) + mlp_matrix_parameters(config))
    core = costs.layers[0] - weights
    choice = RecomputeConfig(recompute, recompute_layers)
    forward, inputs, late = [], [], []
    for stage, (start, stop) in enumerate(ranges):
        count = stop - start
        own = layer_policies(choice, count) if policies is None else policies[start:stop]
        again = recomputed_flops(config, sequence_length, own, operations, stops_early=False)
        first, last = stage == 0, stage == len(ranges) - 1
        head = head_forward_flops(config)
        forward.append(sum(costs.layers[start:stop]) + first * costs.embedding + last * costs.head)
        inputs.append(count * (weights + 2 * core) + again + last * costs.head)
        late.append(count * weights + first * costs.embedding + last * head)
    return StageCosts(tuple(forward), tuple(inputs), tuple(late))


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
