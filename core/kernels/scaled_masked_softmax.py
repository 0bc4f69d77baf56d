"""Softmax of scaled and masked attention scores, for attention whose weights must be in hand."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gridtron.core.kernels.backend import contiguous_like, launcher, register, row_backend
from gridtron.core.kernels.blocks import as_rows, row_blocks
from gridtron.core.precision import wide_dtype


def scaled_masked_softmax(
    scores: Float[Tensor, "batch heads queries keys"],
    scale: float,
    causal: bool = True,
    mask: Bool[Tensor, "..."] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "batch heads queries keys"]:
    """``softmax(scale * scores)`` over the keys that count; zero elsewhere, and zeros where none counts.

    Computed in float32 or wider; keeps its result only.

    Args:
        scores: any strides.
        causal: a query sees no later key; with fewer queries than keys the last query sees all.
        mask: True where a key does not count; broadcast to ``scores``.

    Raises:
        ValueError: an unknown backend.
    """
    chosen = row_backend("scaled_masked_softmax", backend, scores)
    if chosen == "apex":
        from gridtron.core.kernels.apex import apex_scaled_causal_softmax, takes_softmax

        if causal and mask is None and takes_softmax(scores):
            return apex_scaled_causal_softmax(scores, scale)
        chosen = "torch"
    return _Softmax.apply(scores, scale, causal, mask, chosen)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, causal: bool, mask: Tensor | None, backend: str) -> Tensor:
        run = _forward if backend == "torch" else _forward_operator
        weights = run(scores, scale, causal, mask)
        ctx.save_for_backward(weights)
        ctx.scale, ctx.backend = scale, backend
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        run = _backward if ctx.backend == "torch" else _backward_operator
        return run(gradient, weights, ctx.scale), None, None, None, None


def _forward(scores: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    dtype = wide_dtype(scores.dtype)
    wide = scores.mul(scale) if scores.dtype == dtype else scores.to(dtype).mul_(scale)
    queries, keys = scores.shape[-2:]
    if causal:
        future = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        wide.masked_fill_(future, float("-inf"))
        mask = future if mask is None and queries > keys else None if mask is None else mask | future
    if mask is not None:
        wide.masked_fill_(mask, float("-inf"))
        # Softmax of a row that nothing is left of is 0 / 0.
        wide.masked_fill_(mask.all(-1, keepdim=True), 0)
    weights = torch.softmax(wide, -1).to(scores.dtype)
    return weights if mask is None else weights.masked_fill_(mask.all(-1, keepdim=True), 0)


def _backward(gradient: Tensor, weights: Tensor, scale: float) -> Tensor:
    wide = wide_dtype(weights.dtype)
    grad = contiguous_like(weights)
    for given, own, out in row_blocks(as_rows(gradient), as_rows(weights), as_rows(grad)):
        own = own.to(wide)
        product = own * given
        mean = product.sum(-1, keepdim=True)
        out.copy_(product.addcmul_(own, mean, value=-1).mul_(scale))
    return grad


# ---------------------------------------------------------------- Triton
_forward_operator = register(
    "scaled_masked_softmax",
    "(Tensor scores, float scale, bool causal, Tensor? mask) -> Tensor",
    launcher("scaled_masked_softmax", "forward"),
    lambda scores, scale, causal, mask: contiguous_like(scores),
)
_backward_operator = register(
    "scaled_masked_softmax_backward",
    "(Tensor gradient, Tensor weights, float scale) -> Tensor",
    launcher("scaled_masked_softmax", "backward"),
    lambda gradient, weights, scale: contiguous_like(weights),
)
