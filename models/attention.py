"""Causal self-attention with grouped key and value heads, split by heads over the tensor axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from gridtron.core.kernels.config import KernelsConfig
from gridtron.core.kernels.rope import rope
from gridtron.core.kernels.scaled_masked_softmax import scaled_masked_softmax
from gridtron.core.random import random_key
from gridtron.core.sharding import scaled
from gridtron.models.config import GPTConfig
from gridtron.models.heads import HeadSplit
from gridtron.parallel import Dropout, SampleContext, TensorParallelLinear, activation_checkpoint
from gridtron.parallel.linear import column_linear


class Attention(nn.Module):
    """``(batch, sequence, hidden)`` or ``(share, batch, hidden)`` (GPTConfig.sequence_first) to the same; q, k, v are
    separate weights with one gather and one reduction between them.

    Args:
        config: shape of the model.
        name: global name of this module, from which its dropout's key follows.
        seed: of the dropout.
        recompute_core: recompute the attention core in the backward pass.
        linear: options of every TensorParallelLinear (axis, sequence_parallel, device, dtype).
        kernels: implementations of the local operations.
    """

    def __init__(
        self,
        config: GPTConfig,
        name: str,
        seed: int,
        recompute_core: bool,
        linear: dict[str, Any],
        kernels: KernelsConfig,
    ):
        super().__init__()
        self.width = config.head_size
        self.recompute_core = recompute_core
        heads, kv_heads = config.num_attention_heads, config.kv_heads
        group = heads // kv_heads
        axis = linear["axis"]
        split = HeadSplit.over(heads, kv_heads, axis.size)
        query = [scaled(ranges, self.width) for ranges in split.query]
        key_value = [scaled(ranges, self.width) for ranges in split.key_value]
        bias = config.projection_bias
        hidden, query_size, kv_size = config.hidden_size, heads * self.width, kv_heads * self.width
        self.q = TensorParallelLinear(hidden, query_size, partition="column", bias=bias, rows=query, **linear)
        self.k = TensorParallelLinear(hidden, kv_size, partition="column", bias=bias, rows=key_value, **linear)
        self.v = TensorParallelLinear(hidden, kv_size, partition="column", bias=bias, rows=key_value, **linear)
        self.out = TensorParallelLinear(query_size, hidden, partition="row", bias=config.bias, rows=query, **linear)
        # Of the activations' first two dimensions.
        self.order = "s b" if config.sequence_first(self.q.sequence_parallel) else "b s"
        self.rope, self.softmax = kernels.of("rope"), kernels.of("scaled_masked_softmax")
        key = random_key(seed, "dropout", f"{name}.dropout")
        self.dropout = Dropout(config.attention_dropout, key, backend=kernels.of("dropout_add"))
        self.first_head = split.query[axis.rank][0][0] if split.query[axis.rank] else 0
        reads = split.key_value_of(axis.rank, group)
        # Equal groups in order are what SDPA's grouped attention does; any other pattern is picked by index.
        picked = split.picked_by_index(axis.rank, group)
        self.grouped = not picked and len(set(reads)) != len(reads)
        self.reads = reads if picked else None

    def forward(
        self,
        x: Float[Tensor, "*batch hidden"],
        tables: tuple[Tensor, Tensor] | None,
        context: SampleContext | None = None,
    ) -> Float[Tensor, "*batch hidden"]:
        layers = [(layer.weight, layer.bias) for layer in (self.q, self.k, self.v)]
        projected = column_linear(x, layers, self.q.axis, self.q.sequence_parallel, self.q.overlap)
        q, k, v = (rearrange(t, f"{self.order} (heads width) -> b heads s width", width=self.width) for t in projected)
        if tables is not None:
            q, k = rope(q, *tables, self.rope), rope(k, *tables, self.rope)
        policy = "full" if self.recompute_core and self.training else "none"
        mixed = activation_checkpoint(self.core, q, k, v, context, policy=policy)
        return self.out(rearrange(mixed, f"b heads s width -> {self.order} (heads width)"))

    def core(self, q: Tensor, k: Tensor, v: Tensor, context: SampleContext | None) -> Tensor:
        """softmax(q k^T / sqrt(width)) v, causal: (batch, heads, sequence, width)."""
        if self.reads is not None:
            index = torch.tensor(self.reads, dtype=torch.int64, device=k.device)
            k, v = k.index_select(1, index), v.index_select(1, index)
        if self.training and self.dropout.p > 0:
            return self._explicit(q, k, v, context)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, context: SampleContext | None) -> Tensor:
        # SDPA draws its own mask from a stream; ours belongs to the sample, so the weights must be in hand.
        if self.grouped:
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        weights = scaled_masked_softmax(q @ k.transpose(-1, -2), self.width**-0.5, backend=self.softmax)
        return self.dropout.attention(weights, self.first_head, context) @ v
