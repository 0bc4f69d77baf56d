"""Softmax of scaled and masked attention scores, for attention whose weights must be in hand."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gridtron.core.kernels.backend import contiguous_like, launcher, register, require, row_backend
from gridtron.core.kernels.blocks import as_rows, row_blocks
from gridtron.core.once import differentiable_once
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
        ValueError: an unknown backend, or tensors that do not fit each other.
    """
    fits = scores.ndim == 4 and scores.is_floating_point() and (mask is None or _masks(mask, scores))
    rule = "floating scores (batch, heads, queries, keys), and a mask of bool that broadcasts to them"
    require(fits, "scaled_masked_softmax", rule, scores=scores, mask=mask)
    chosen = row_backend("scaled_masked_softmax", backend, scores)
    if chosen == "apex":
        from gridtron.core.kernels.apex import apex_scaled_causal_softmax, takes_softmax

        if causal and mask is None and takes_softmax(scores):
            return apex_scaled_causal_softmax(scores, scale)
        chosen = "torch"
    return _Softmax.apply(scores, scale, causal, mask, chosen)


def _masks(mask: Tensor, scores: Tensor) -> bool:
    sizes = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    return mask.dtype == torch.bool and mask.ndim <= scores.ndim and all(own in (1, size) for own, size in sizes)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, causal: bool, mask: Tensor | None, backend: str) -> Tensor:
        if torch.compiler.is_compiling() and backend == "torch":
            weights = _forward(scores, scale, causal, mask)
        else:
            # One operator for both: a selective checkpoint keeps its result by its name.
            weights = _forward_operator(scores, scale, causal, mask, backend == "triton")
        ctx.save_for_backward(weights)
        ctx.scale, ctx.backend = scale, backend
        return weights

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        run = _backward if ctx.backend == "torch" else _backward_operator
        return run(gradient, weights, ctx.scale), None, None, None, None


def _forward(scores: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    queries, keys = scores.shape[-2:]
    if causal:
        future = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        mask = future if mask is None else mask | future
    # Under the causal mask alone every query sees a key, where there are no fewer keys.
    empty_rows = mask is not future if causal else mask is not None
    empty_rows = empty_rows or queries > keys
    weights = contiguous_like(scores)
    masks = None if mask is None or mask.ndim <= 2 else mask.expand(scores.shape).flatten(0, -3)
    tensors = [scores.flatten(0, -3), weights.flatten(0, -3), *([] if masks is None else [masks])]
    for values, out, *own in row_blocks(*tensors):
        wide = values.mul(scale) if values.dtype == wide_dtype(values.dtype) else values.to(torch.float32).mul_(scale)
        hidden = own[0] if own else mask
        if hidden is not None:
            wide.masked_fill_(hidden, float("-inf"))
        if out.dtype == wide.dtype:
            torch.softmax(wide, -1, out=out)
        else:
            out.copy_(torch.softmax(wide, -1))
        if hidden is not None and empty_rows:
            # Softmax of a row that nothing is left of is 0 / 0.
            out.masked_fill_(hidden.all(-1, keepdim=True), 0)
    return weights


def _backward(gradient: Tensor, weights: Tensor, scale: float) -> Tensor:
    wide = wide_dtype(weights.dtype)
    grad = contiguous_like(weights)
    for given, own, out in row_blocks(as_rows(gradient), as_rows(weights), as_rows(grad)):
        own = own.to(wide)
        product = torch.mul(own, given, out=out) if out.dtype == wide else own * given
        mean = product.sum(-1, keepdim=True)
        product.addcmul_(own, mean, value=-1).mul_(scale)
        if product is not out:
            out.copy_(product)
    return grad


# ---------------------------------------------------------------- Triton
_launch_forward = launcher("scaled_masked_softmax", "forward")


def _run_forward(scores: Tensor, scale: float, causal: bool, mask: Tensor | None, triton: bool) -> Tensor:
    return (_launch_forward if triton else _forward)(scores, scale, causal, mask)


_forward_operator = register(
    "scaled_masked_softmax",
    "(Tensor scores, float scale, bool causal, Tensor? mask, bool triton) -> Tensor",
    _run_forward,
    lambda scores, scale, causal, mask, triton: contiguous_like(scores),
)
_backward_operator = register(
    "scaled_masked_softmax_backward",
    "(Tensor gradient, Tensor weights, float scale) -> Tensor",
    launcher("scaled_masked_softmax", "backward"),
    lambda gradient, weights, scale: contiguous_like(weights),
)
