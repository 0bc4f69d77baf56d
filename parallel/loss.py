"""Cross-entropy over a vocabulary that is split over a tensor axis; the logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gridtron.core.communication import all_reduce
from gridtron.core.grid import Axis
from gridtron.core.precision import wide_dtype
from gridtron.core.sharding import even_ranges
from gridtron.parallel.products import as_rows


def vocab_parallel_cross_entropy(
    logits: Float[Tensor, "*batch share"],
    target: Int[Tensor, "*batch"],
    axis: Any = None,
    ignore_index: int = -100,
    inplace: bool = False,
    *,
    vocabulary: int | None = None,
) -> Float[Tensor, "*batch"]:
    """Loss of each token: ``log sum exp(logits) - logits[target]``, 0 where the target is ``ignore_index``.

    Stable for any logits (the maximum over the axis is subtracted); computed in float32, or in the logits' dtype where
    that is wider. Two small reductions over the axis: the maximum, and the sums together with the target's logit
    (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

    Args:
        logits: (..., share of the vocabulary): even shares in rank order, the first ranks one longer where the
            vocabulary does not divide (as VocabParallelEmbedding and a column-parallel head give them).
        target: (...) global token ids.
        axis: Axis, one-dimensional DeviceMesh, ProcessGroup, or None (whole).
        ignore_index: targets with no loss and no gradient.
        inplace: overwrite the logits (they must not be needed again): saves their bytes once more.
        vocabulary: size of the whole vocabulary, where it is known; else the shares are summed over the axis.

    Returns:
        (...) losses, a mean is the caller's: what counts may lie on other ranks.

    Raises:
        ValueError: shapes that do not match, or (on the CPU) a target outside the vocabulary.
    """
    axis = Axis.of(axis)
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} and target {tuple(target.shape)} must agree in all but the last dimension"
        )
    return _CrossEntropy.apply(logits, target, axis, ignore_index, inplace, vocabulary)


def _vocabulary_place(share: int, total: int | None, axis: Axis, device: torch.device) -> tuple[int, int]:
    """(first row of this rank, size of the vocabulary)."""
    if total is None:
        # Shares differ by one at most, the longer ones first: the sum tells all of them.
        total = share if axis.size == 1 else int(all_reduce(torch.tensor([share], device=device), axis)[0])
    start, stop = even_ranges(total, axis.size)[axis.rank]
    if stop - start != share:
        raise ValueError(
            f"{share} logits on {axis.name} rank {axis.rank} of {axis.size}: a vocabulary of {total} "
            f"gives it {stop - start}, rows {start}:{stop}"
        )
    return start, total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        axis: Axis,
        ignore_index: int,
        inplace: bool,
        vocabulary: int | None,
    ) -> Tensor:
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        share = logits.shape[-1]
        wide = wide_dtype(logits.dtype)
        # Detached: a view made here of a tensor that autograd tracks could not be changed in place.
        flat = as_rows(logits.detach())
        target = target.reshape(-1)
        start, total = _vocabulary_place(share, vocabulary, axis, logits.device)
        ignored = target == ignore_index
        _check_targets(target, ignored, total)
        tokens = flat.shape[0]
        maximum = flat.amax(-1).to(wide) if share else flat.new_full((tokens,), float("-inf"), dtype=wide)
        all_reduce(maximum, axis, "max")
        # A row of -inf everywhere has no maximum to subtract; its loss is NaN all the same.
        if inplace and flat.dtype == wide:
            exponents = flat.sub_(maximum.unsqueeze(1))
        else:
            exponents = flat.to(wide).sub(maximum.unsqueeze(1))
        local = target - start
        own = (local >= 0) & (local < share) & ~ignored
        place = torch.where(own, local, 0)
        sums = exponents.new_empty(2, tokens)
        if share:
            sums[1].copy_(exponents.gather(1, place.unsqueeze(1)).squeeze(1)).masked_fill_(~own, 0)
        else:
            sums[1].zero_()
        exponents.exp_()
        torch.sum(exponents, -1, out=sums[0])
        all_reduce(sums, axis)
        losses = sums[0].log() - sums[1]
        losses.masked_fill_(ignored, 0)
        # What the backward pass scales is softmax; division waits until then, where it joins the gradient's product.
        ctx.save_for_backward(exponents, sums[0].reciprocal(), own, place, ignored)
        return losses.view(ctx.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        exponents, inverse, own, place, ignored = ctx.saved_tensors
        weight = gradient.reshape(-1).to(exponents.dtype).masked_fill(ignored, 0)
        grad = exponents.mul((weight * inverse).unsqueeze(1))
        # 0 x inf: an ignored row may hold anything, and its gradient is zero.
        grad.masked_fill_(ignored.unsqueeze(1), 0)
        if grad.shape[1]:
            grad.scatter_add_(1, place.unsqueeze(1), torch.where(own, -weight, 0).unsqueeze(1))
        return grad.to(ctx.dtype).view(ctx.shape), None, None, None, None, None


def _check_targets(target: Tensor, ignored: Tensor, vocabulary: int) -> None:
    """On the CPU a wrong target is named; on a device the look would wait for the queue."""
    if target.device.type != "cpu" or target.numel() == 0:
        return
    wrong = ((target < 0) | (target >= vocabulary)) & ~ignored
    if bool(wrong.any()):
        value = int(target[wrong][0])
        raise ValueError(f"target {value} is outside the vocabulary of {vocabulary} (0 to {vocabulary - 1})")
