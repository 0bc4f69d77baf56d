"""An embedding whose vocabulary is split over a tensor axis (Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from gridtron.core.grid import Axis
from gridtron.core.random import draw_key, normal_
from gridtron.core.sharding import Sharding
from gridtron.parallel.collectives import reduce_from_region, reduce_scatter_to_sequence
from gridtron.parallel.linear import describe_share


class VocabParallelEmbedding(nn.Module):
    """Rows of the table are split over the axis, unevenly where they must be, never padded.

    ``tokens (sequence, ...) -> (sequence, ..., embedding_dim)``; with sequence_parallel the output's first dimension
    is this rank's share of the sequence.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: width.
        axis: Axis, one-dimensional DeviceMesh, ProcessGroup, or None (whole).
        sequence_parallel: as above.
        device, dtype: of the table. Drawn from N(0, 1), as torch.nn.Embedding, from one key by global index.

    Raises:
        ValueError: sizes under 1; a token outside the vocabulary (checked on the CPU, where it costs nothing).
    """

    hidden_matrices = False
    """Rows are looked up, not multiplied: see named_parameters."""

    copies: Mapping[str, Axis]
    """Set where the first and the last stage of a pipeline share the table: see named_parameters."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        axis: Any = None,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if min(num_embeddings, embedding_dim) < 1:
            raise ValueError(f"num_embeddings={num_embeddings} and embedding_dim={embedding_dim} must be at least 1")
        self.axis = Axis.of(axis)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel = sequence_parallel and self.axis.size > 1
        self.shardings = {"weight": Sharding.split((num_embeddings, embedding_dim), 0, self.axis.size)}
        shape = self.shardings["weight"].local_shape(self.axis.rank)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table anew: the whole is the same on every grid."""
        normal_(self.weight, draw_key(), self.shardings["weight"], self.axis.rank)

    def forward(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch dim"]:
        if not tokens.is_cuda and tokens.device.type != "meta" and tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"token {low if low < 0 else high} is outside the vocabulary of {self.num_embeddings} "
                    f"(0 to {self.num_embeddings - 1}): is this the tokenizer the model was made for?"
                )
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight)
        held = self.shardings["weight"].ranges(self.axis.rank)
        start, stop = held[0] if held else (0, 0)
        own = (tokens >= start) & (tokens < stop)
        if held:
            local = F.embedding(torch.where(own, tokens - start, 0), self.weight)
            local = local * own.unsqueeze(-1)
        else:
            local = self.weight.new_zeros(*tokens.shape, self.embedding_dim) + self.weight.sum()
        if self.sequence_parallel:
            return reduce_scatter_to_sequence(local, self.axis)
        return reduce_from_region(local, self.axis)

    def extra_repr(self) -> str:
        share = describe_share(self.shardings["weight"], self.axis)
        return f"{self.num_embeddings}, {self.embedding_dim}, {share}"
