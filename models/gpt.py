"""One decoder for GPT-2/GPT-3 and Llama/Qwen, buildable by stages.

Activations are (batch, sequence, hidden) or (sequence, batch, hidden), as GPTConfig.sequence_first says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gridtron.core.grid import Axis
from gridtron.core.kernels.config import KernelsConfig
from gridtron.core.random import draw_key, normal_, random_key
from gridtron.models.block import Block
from gridtron.models.config import GPTConfig
from gridtron.models.norm import build_norm
from gridtron.models.partition import default_placement, layer_ranges
from gridtron.models.rotary import rotary_tables
from gridtron.parallel import (
    Dropout,
    SampleContext,
    TensorParallelLinear,
    VocabParallelEmbedding,
    activation_checkpoint,
    sequence_parallel_region,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from gridtron.parallel.linear import column_linear
from gridtron.parallel.operations import forward_sum, kept_operators
from gridtron.parallel.parameters import named_parameters
from gridtron.parallel.recompute import LAYER_POLICIES, RecomputeConfig, layer_policies

if TYPE_CHECKING:
    from gridtron.core.grid import Grid


class Stage(nn.Module):
    """Consecutive layers, with the embedding before the first and the head after the last.

    Its submodules have the names they have in the whole model, so that names leave no trace of the split.
    """

    def __init__(self, gpt: GPT, layers: range, first: bool, last: bool):
        super().__init__()
        self.first, self.last = first, last
        self.config, self.axis, self.sequence_parallel = gpt.config, gpt.axis, gpt.sequence_parallel
        self.sequence_first = gpt.config.sequence_first(gpt.sequence_parallel)
        self.overlap, self.kernels = gpt.overlap, gpt.kernels
        operations = tuple(gpt.recompute.operations or ())
        # The attention core's own checkpoint is inside of the layer.
        outer: dict[str, str | tuple[str, ...]] = {"full": "full", "operations": operations}
        self.policies = [outer.get(gpt.policies[layer], "none") for layer in layers]
        if first or (last and gpt.config.tie_embeddings):
            self.embedding = gpt.embedding
        if first:
            if gpt.config.position == "learned":
                self.positions = gpt.positions
            self.embedding_dropout = gpt.embedding_dropout
        self.blocks = nn.ModuleDict({str(layer): gpt.blocks[str(layer)] for layer in layers})
        if last:
            self.final_norm = gpt.final_norm
            if not gpt.config.tie_embeddings:
                self.head = gpt.head
        self._tables: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def forward(
        self,
        x: Int[Tensor, "batch sequence"] | Float[Tensor, "..."],
        targets: Int[Tensor, "batch sequence"] | None = None,
        context: SampleContext | None = None,
    ) -> Tensor:
        """Tokens or the activation before -> the activation after, or on the last stage logits or losses."""
        if self.first:
            x = self._embed(x, context)
        tables = self._rotary(x)
        for policy, block in zip(self.policies, self.blocks.values(), strict=True):
            x = activation_checkpoint(block, x, tables, context, policy=policy if self.training else "none")
        if not self.last:
            return x
        normed = self.final_norm(x)
        if targets is None:
            return self._turned(self._logits(normed))
        return self._turned(self._losses(normed, self._turned(targets)))

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        vocabulary = self.config.vocab_size
        if self.kernels.chunked_loss:
            return vocab_parallel_linear_cross_entropy(
                x,
                self.embedding.weight if self.config.tie_embeddings else self.head.weight,
                targets,
                self.axis,
                sequence_parallel=self.sequence_parallel,
                vocabulary=vocabulary,
                backend=self.kernels.of("linear_cross_entropy"),
            )
        backend = self.kernels.of("cross_entropy")
        return vocab_parallel_cross_entropy(
            self._logits(x), targets, self.axis, inplace=True, vocabulary=vocabulary, backend=backend
        )

    def _turned(self, x: Tensor) -> Tensor:
        """(batch, sequence, ...) from or to the order of the activations."""
        return x.transpose(0, 1) if self.sequence_first else x

    def _embed(self, tokens: Tensor, context: SampleContext | None) -> Tensor:
        length = tokens.shape[1]
        if self.sequence_parallel and length % self.axis.size:
            lower = length // self.axis.size * self.axis.size
            raise ValueError(
                f"a sequence of {length} does not divide over tensor={self.axis.size} with sequence_parallel; "
                f"nearest lengths: {lower}, {lower + self.axis.size}"
            )
        x = self.embedding(self._turned(tokens))
        if self.config.position == "learned":
            if length > self.config.max_position_embeddings:
                raise ValueError(
                    f"a sequence of {length} is longer than the {self.config.max_position_embeddings} learned positions"
                )
            positions = torch.arange(length, device=tokens.device)
            if self.sequence_parallel:
                positions = positions.chunk(self.axis.size)[self.axis.rank]
            x = x + self._turned(self.positions(positions).unsqueeze(0))
        return self.embedding_dropout(x, context)

    def _rotary(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Tables of all positions: attention sees the whole sequence even where x is a share of it."""
        if self.config.position != "rotary":
            return None
        length = x.shape[0 if self.sequence_first else 1] * (self.axis.size if self.sequence_parallel else 1)
        key = (length, x.dtype, x.device)
        if key not in self._tables:
            self._tables = {key: rotary_tables(self.config, length, x.dtype, x.device)}
        return self._tables[key]

    def _logits(self, x: Tensor) -> Tensor:
        if not self.config.tie_embeddings:
            return self.head(x)
        layers = [(self.embedding.weight, None)]
        (logits,) = column_linear(x, layers, self.axis, self.sequence_parallel, self.overlap)
        return logits


class GPT(nn.Module):
    """A decoder-only transformer over the tensor and pipeline axes of a grid.

    Initial weights are a function of (seed, parameter's name, global index): the same on every grid, to the bit.
    Names are global (``blocks.7.mlp.up.weight``), so that stages leave no trace in them.

    Args:
        config: its shape; vocab_size must be set.
        grid: the process grid; None: the whole model in one process.
        stages: which stages this process holds; default: what ``placement`` says of its place on the pipeline axis.
        num_stages: into how many the layers are split; default: one a pipeline rank.
        placement: the pipeline rank of each stage (a Schedule's ``placement``); default: stages in turn over the ranks.
        layers_per_stage: how many layers each stage gets; default: balanced by cost (models/cost/split.py).
        sequence_length: that costs are balanced at; default: config.max_position_embeddings.
        seed: of weights and dropout; default: drawn from torch's default CPU generator.
        sequence_parallel: norms, dropout and residuals on shares of the sequence.
        kernels: implementations of the local operations; default: the fastest that the device has.
        overlap: as TensorParallelLinear has it; "none" where ``recompute`` keeps operations of a list.
        recompute: what is recomputed in the backward pass, alike on every stage; not "auto".
        policies: of each layer of the whole model, "none", "selective" (the attention core), "operations" (those of
            ``recompute``) or "full", in place of what ``recompute`` says of them.
        device, dtype: of the parameters.

    Attributes:
        stages: stage -> Stage, those that this process holds.
        num_stages: of the whole model.
        layer_ranges: (start, stop) of every stage's layers.

    Raises:
        ValueError: every rule of the shape that is broken; a split or a placement that does not fit.

    Shapes:
        ``model(tokens)``: (batch, sequence) -> logits (batch, sequence, share of the vocabulary);
        ``model(tokens, targets)``: -> losses of each token (batch, sequence), 0 where the target is -100.
        Both need all stages in this process; otherwise ``PipelineRunner(model.stages, schedule, grid.pipeline)``.
    """

    def __init__(
        self,
        config: GPTConfig,
        grid: Grid | None = None,
        stages: Sequence[int] | None = None,
        num_stages: int | None = None,
        *,
        placement: Sequence[int] | None = None,
        layers_per_stage: Sequence[int] | None = None,
        sequence_length: int | None = None,
        seed: int | None = None,
        sequence_parallel: bool = False,
        overlap: str = "none",
        kernels: KernelsConfig | None = None,
        recompute: RecomputeConfig | None = None,
        policies: Sequence[str] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        axis = Axis("tensor") if grid is None else grid.tensor
        pipeline = Axis("pipeline") if grid is None else grid.pipeline
        count = num_stages or len(placement or ()) or pipeline.size
        violations = config.violations() + _axis_violations(config, axis)
        if violations:
            raise ValueError("; ".join(violations))
        ranks = _ranks_of_stages(pipeline, count, placement, stages)
        held = (
            [stage for stage, rank in enumerate(ranks) if rank == pipeline.rank] if stages is None else sorted(stages)
        )
        self.config, self.axis, self.num_stages = config, axis, count
        self.layer_ranges = layer_ranges(config, count, layers_per_stage, sequence_length)
        self.sequence_parallel = sequence_parallel and axis.size > 1
        self.recompute = recompute or RecomputeConfig()
        self.kernels = kernels or KernelsConfig()
        self.policies = _policies(self.recompute, self.layer_ranges, policies)
        self.seed = draw_key() if seed is None else seed
        # Parts are made without memory: their own initial weights would be drawn only to be drawn over.
        linear = {"axis": axis, "sequence_parallel": self.sequence_parallel, "device": "meta", "dtype": dtype}
        if "operations" in self.policies:
            linear["forward_sum"] = forward_sum(self.recompute.operations or ())
        # A list keeps whole products by name; there are none in pieces.
        self.overlap = linear["overlap"] = "none" if "operations" in self.policies else overlap
        ranges = self.layer_ranges
        layers = [layer for stage in held for layer in range(*ranges[stage])]
        first, last = 0 in held, count - 1 in held
        with torch.random.fork_rng(devices=[]):  # the parts draw keys of their own, which are not used
            self._build(layers, first, last, linear)
        if config.tie_embeddings and first != last and grid is not None and pipeline.size > 1:
            self.embedding.copies = {"weight": grid.part("pipeline", [ranks[0], ranks[-1]])}
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            self.to_empty(device=device)
            self.initialize()
        # Outside the module tree: a stage's parameters keep the names they have here.
        made = {stage: Stage(self, range(*ranges[stage]), stage == 0, stage == count - 1) for stage in held}
        object.__setattr__(self, "stages", made)

    def _build(self, layers: list[int], first: bool, last: bool, linear: dict[str, Any]) -> None:
        config, axis, device, dtype = self.config, self.axis, linear["device"], linear["dtype"]
        assert config.vocab_size is not None
        kind = {"device": device, "dtype": dtype}
        if first or (last and config.tie_embeddings):
            self.embedding = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, axis, self.sequence_parallel, **kind
            )
        if first:
            if config.position == "learned":
                self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size, **kind)
                if self.sequence_parallel:
                    sequence_parallel_region(self.positions, axis)
            key = random_key(self.seed, "dropout", "embedding_dropout")
            self.embedding_dropout = Dropout(
                config.dropout,
                key,
                axis,
                self.sequence_parallel,
                batch_first=not config.sequence_first(self.sequence_parallel),
                backend=self.kernels.of("dropout_add"),
            )
        core = {layer: self.policies[layer] == "selective" for layer in layers}
        shared = (linear, self.kernels)
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, f"blocks.{layer}", self.seed, core[layer], *shared) for layer in layers}
        )
        if last:
            self.final_norm = build_norm(config, axis, self.sequence_parallel, device, dtype, self.kernels)
            if not config.tie_embeddings:
                self.head = TensorParallelLinear(config.hidden_size, config.vocab_size, bias=False, **linear)

    def initialize(self) -> None:
        """Weights N(0, init_std), those that write to the residual stream narrower by sqrt(2 layers) (Radford et al.
        2019); biases 0, norms 1. Drawn by (seed, name, global index)."""
        residual = self.config.init_std / math.sqrt(2 * self.config.num_layers)
        for item in named_parameters(self):
            if item.parameter.ndim == 1:
                nn.init.constant_(item.parameter, 1.0 if item.name.endswith("norm.weight") else 0.0)
                continue
            writes = item.name.endswith(("attention.out.weight", "mlp.down.weight"))
            key = random_key(self.seed, "parameter", item.name)
            std = residual if writes else self.config.init_std
            normal_(item.parameter, key, item.sharding, item.axis.rank, std)

    stages: Mapping[int, Stage]

    def forward(
        self,
        tokens: Int[Tensor, "batch sequence"],
        targets: Int[Tensor, "batch sequence"] | None = None,
        context: SampleContext | None = None,
    ) -> Tensor:
        if len(self.stages) < self.num_stages:
            held = ", ".join(map(str, self.stages))
            raise ValueError(
                f"this process holds stage {held} of {self.num_stages} (0 to {self.num_stages - 1}), and model(tokens) "
                "needs them all; run them over the pipeline axis by "
                "gridtron.parallel.pipeline.PipelineRunner(model.stages, schedule, grid.pipeline)"
            )
        x = tokens
        for stage in sorted(self.stages):
            x = self.stages[stage](x, targets, context)
        return x

    def train(self, mode: bool = True) -> GPT:
        super().train(mode)
        for stage in getattr(self, "stages", {}).values():
            stage.training = mode
        return self


def _policies(
    recompute: RecomputeConfig, ranges: Sequence[tuple[int, int]], policies: Sequence[str] | None
) -> tuple[str, ...]:
    """What is recomputed of each layer of the whole model.

    Raises:
        ValueError: "auto", policies that do not fit the layers, unknown policies or operations.
    """
    if recompute.mode == "auto" and policies is None:
        raise ValueError(
            "recompute mode auto is a choice by memory: make it by gridtron.models.cost.choice.choose_recompute, and "
            "give its policies="
        )
    kept_operators(recompute.operations or ())
    if policies is None:
        return tuple(policy for start, stop in ranges for policy in layer_policies(recompute, stop - start))
    if len(policies) != ranges[-1][1] or not set(policies) <= set(LAYER_POLICIES):
        raise ValueError(
            f"policies={list(policies)}: one of {', '.join(LAYER_POLICIES)} for each of the {ranges[-1][1]} layers"
        )
    return tuple(policies)


def _ranks_of_stages(
    pipeline: Axis, count: int, placement: Sequence[int] | None, stages: Sequence[int] | None
) -> tuple[int, ...]:
    """The pipeline rank of each stage.

    Raises:
        ValueError: a placement that does not fit the axis, or ``stages`` that are not what it gives this rank.
    """
    if stages is not None and (not stages or min(stages) < 0 or max(stages) >= count or len(set(stages)) < len(stages)):
        raise ValueError(f"stages={list(stages)} must be one or more of 0 to {count - 1}, each once")
    ranks = default_placement(count, pipeline.size) if placement is None else tuple(placement)
    if len(ranks) != count:
        raise ValueError(f"placement={list(ranks)} is of {len(ranks)} stages and num_stages={count}; give one of them")
    if set(ranks) != set(range(pipeline.size)):
        raise ValueError(
            f"placement={list(ranks)} must name each of the {pipeline.size} ranks of the pipeline axis, from 0, "
            "and no other"
        )
    here = [stage for stage, rank in enumerate(ranks) if rank == pipeline.rank]
    # On one rank there is nobody to hold the other stages: a part of the model alone is what was asked for.
    if stages is not None and pipeline.size > 1 and sorted(stages) != here:
        raise ValueError(
            f"stages={list(stages)} on pipeline rank {pipeline.rank}, where placement={list(ranks)} puts {here}; "
            "give the placement that is meant"
        )
    return ranks


def _axis_violations(config: GPTConfig, axis: Axis) -> list[str]:
    found = []
    if config.vocab_size is None:
        found.append("vocab_size is not set: give the tokenizer's")
    heads = config.num_attention_heads
    if axis.size > min(heads, config.ffn_size, config.vocab_size or heads):
        limit = min(heads, config.ffn_size, config.vocab_size or heads)
        found.append(
            f"tensor={axis.size} ranks for num_attention_heads={heads}, ffn_hidden_size={config.ffn_size} and "
            f"vocab_size={config.vocab_size}: at most {limit} can be used"
        )
    return found
