"""The head's product and the vocabulary-parallel cross-entropy together: logits exist a chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gridtron.core.communication import all_gather, all_reduce, reduce_scatter
from gridtron.core.grid import Axis
from gridtron.core.kernels.backend import backend_of
from gridtron.core.kernels.blocks import as_rows
from gridtron.core.kernels.config import chunk_rows
from gridtron.core.kernels.cross_entropy import IGNORED
from gridtron.core.kernels.linear_cross_entropy import chunked_gradients, chunked_statistics
from gridtron.core.once import differentiable_once
from gridtron.parallel.loss import local_targets, reduce_statistics


def vocab_parallel_linear_cross_entropy(
    x: Float[Tensor, "*batch features"],
    weight: Float[Tensor, "share features"],
    target: Int[Tensor, "*whole"],
    axis: Any = None,
    ignore_index: int = -100,
    *,
    sequence_parallel: bool = False,
    vocabulary: int | None = None,
    chunk: int | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*whole"]:
    """Loss of each token, as :func:`gridtron.parallel.vocab_parallel_cross_entropy` gives it of ``x weight^T``.

    The logits of a chunk of tokens are computed, looked at and let go, and computed again in the backward pass: a third
    more work in the head for the logits' memory. Two small reductions over the axis for all chunks together, and one of
    the gradient of x. The weight's gradient is autograd's at once: it is never deferred.

    Args:
        x: (..., features), the input of the head; with sequence_parallel this rank's share of the first dimension.
        weight: (share of the vocabulary, features): even shares in rank order.
        target: (...) global token ids of the whole first dimension.
        axis: Axis, one-dimensional DeviceMesh, ProcessGroup, or None (whole).
        ignore_index: targets with no loss and no gradient.
        sequence_parallel: x is gathered, and its gradient reduced and scattered, over the axis.
        vocabulary: size of the whole vocabulary, where it is known; else the shares are summed over the axis.
        chunk: tokens whose logits are held at once; default: by the memory that they take.
        backend: of the local passes: "triton", "torch" or "auto".

    Raises:
        ValueError: shapes that do not match, a chunk below 1, an unknown backend, or (on the CPU) a target outside the
            vocabulary.
    """
    axis = Axis.of(axis)
    gathered = sequence_parallel and axis.size > 1
    shape = (x.shape[0] * axis.size, *x.shape[1:-1]) if gathered else x.shape[:-1]
    if target.shape != shape:
        raise ValueError(f"target {tuple(target.shape)} must be {tuple(shape)}: x is {tuple(x.shape)}")
    if weight.shape[1] != x.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must agree in the last dimension")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: at least 1 token")
    backend = backend_of("linear_cross_entropy", backend, x)
    return _LinearCrossEntropy.apply(x, weight, target, axis, ignore_index, gathered, vocabulary, chunk, backend)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        axis: Axis,
        ignore_index: int,
        gathered: bool,
        vocabulary: int | None,
        chunk: int | None,
        backend: str,
    ) -> Tensor:
        share = weight.shape[0]
        local = local_targets(target, share, axis, ignore_index, vocabulary)
        rows = as_rows(all_gather(x, axis) if gathered else x)
        ctx.chunk = chunk or chunk_rows(rows.shape[0], share, x.device.type)
        ctx.axis, ctx.gathered, ctx.backend = axis, gathered, backend
        found = chunked_statistics(rows, weight, local, ctx.chunk, backend)
        losses, factor = reduce_statistics(found, local, axis)
        # Of a sequence that is split only the share is kept.
        ctx.save_for_backward(x, weight, found.maximum, factor, local)
        return losses.view(target.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, maximum, factor, local = ctx.saved_tensors
        row_weight = gradient.reshape(-1).to(factor.dtype).masked_fill(local == IGNORED, 0)
        whole = all_gather(x, ctx.axis) if ctx.gathered else x
        grad_x, grad_weight = chunked_gradients(
            as_rows(whole),
            weight,
            maximum,
            row_weight * factor,
            row_weight,
            local,
            ctx.chunk,
            for_x=ctx.needs_input_grad[0],
            for_weight=ctx.needs_input_grad[1],
            backend=ctx.backend,
        )
        if grad_x is not None:
            grad_x = (reduce_scatter if ctx.gathered else all_reduce)(grad_x.view(whole.shape), ctx.axis)
        return grad_x, grad_weight, None, None, None, None, None, None, None
