"""Dropout whose mask belongs to the sample, not to the rank that happens to hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gridtron.core.grid import Axis
from gridtron.core.kernels.backend import backend_of, check_backend, require
from gridtron.core.kernels.dropout_add import counted_dropout, dropout_add
from gridtron.core.random import draw_key, keyed_dropout, signed


@dataclass(frozen=True)
class SampleContext:
    """Which samples the rows of a microbatch are: an argument handed down through the model.

    Args:
        samples: global index of each row in the run's stream.
    """

    samples: Int[Tensor, "batch"]


class Dropout(nn.Module):
    """Counted dropout on an activation ``(batch, sequence, features)``, or ``(sequence, batch, features)``.

    With a SampleContext the mask is a function of (key, sample, place in the sample): equal on every grid and in
    recomputation. Without one, a counter of this module's calls stands for the samples (research code).

    Args:
        p: probability of zero, in [0, 1).
        key: 64 bits; default: drawn from torch's default CPU generator.
        axis: the tensor axis, where the sequence is split over it (``sequence_parallel``).
        sequence_parallel: the first dimension is this rank's share of the sequence.
        batch_first: which of the two it is; sequence parallelism has the sequence first, and so it is by default.
        backend: implementation: "triton", "torch" or "auto", which is Triton on CUDA; the masks are the same.

    Raises:
        ValueError: p outside [0, 1); an unknown backend; batch_first where the first dimension is a share of the
            sequence.
    """

    def __init__(
        self,
        p: float,
        key: int | None = None,
        axis: Any = None,
        sequence_parallel: bool = False,
        batch_first: bool = False,
        backend: str = "auto",
    ):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout p={p} must be at least 0 and under 1")
        self.p = p
        self.key = draw_key() if key is None else key
        # A compiler takes a tensor for an input, where a number would make each layer a graph of its own.
        self.key_tensor = torch.tensor(signed(self.key), dtype=torch.int64, device="cpu")
        self.axis = Axis.of(axis)
        self.sequence_parallel = sequence_parallel and self.axis.size > 1
        if batch_first and self.sequence_parallel:
            raise ValueError("batch_first=True with sequence_parallel: a share of the sequence is the first dimension")
        check_backend("dropout_add", backend)
        self.batch_first, self.backend = batch_first, backend
        self.calls = 0

    def forward(
        self, x: Float[Tensor, "first second features"], context: SampleContext | None = None
    ) -> Float[Tensor, "first second features"]:
        return self._drop(x, *self._places(x, context)) if self.training and self.p > 0 else x

    def add(
        self,
        x: Float[Tensor, "first second features"],
        residual: Float[Tensor, "first second features"],
        context: SampleContext | None = None,
    ) -> Float[Tensor, "first second features"]:
        """``residual + self(x, context)``, in one pass where the implementation has one."""
        if not self.training or self.p == 0:
            return residual + x
        if torch.compiler.is_compiling() or backend_of("dropout_add", self.backend, x) == "torch":
            return residual + self(x, context)
        return dropout_add(x, residual, self.p, signed(self.key), *self._places(x, context), self.backend)

    def _places(
        self, x: Float[Tensor, "first second features"], context: SampleContext | None
    ) -> tuple[Tensor, int, list[int], list[int]]:
        """(samples, their dimension, offsets, strides): where the elements of x lie in their samples."""
        rule = "an activation of three dimensions, (batch, sequence, features) or (sequence, batch, features)"
        require(x.ndim == 3, "Dropout", rule, x=x)
        sample_dim = 0 if self.batch_first else 1
        first = x.shape[0] * self.axis.rank if self.sequence_parallel else 0
        samples = self._samples(context, x.shape[sample_dim], x.device)
        strides = [0, x.shape[2], 1] if self.batch_first else [x.shape[2], 0, 1]
        return samples, sample_dim, [first, 0, 0], strides

    def _drop(self, x: Tensor, samples: Tensor, sample_dim: int, offsets: list[int], strides: list[int]) -> Tensor:
        if torch.compiler.is_compiling():
            return keyed_dropout(x, self.p, self.key_tensor, samples, sample_dim, offsets, strides)
        return counted_dropout(x, self.p, signed(self.key), samples, sample_dim, offsets, strides, self.backend)

    def _samples(self, context: SampleContext | None, batch: int, device: torch.device) -> Tensor:
        if context is not None:
            return context.samples
        # Calls and rows have separate halves of the sample index: no two calls share a mask.
        self.calls += 1
        return torch.arange(batch, device=device) + (self.calls << 32)

    def attention(
        self, weights: Float[Tensor, "batch heads query key"], first_head: int, context: SampleContext | None = None
    ) -> Float[Tensor, "batch heads query key"]:
        """The same on attention weights; ``first_head`` is the global index of the first head held here."""
        if not self.training or self.p == 0:
            return weights
        batch, _, queries, keys = weights.shape
        samples = self._samples(context, batch, weights.device)
        strides = [0, queries * keys, keys, 1]
        return self._drop(weights, samples, 0, [0, first_head, 0, 0], strides)

    def extra_repr(self) -> str:
        return f"p={self.p}"
