"""Cross-entropy over a vocabulary that is split over a tensor axis; the logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gridtron.core.communication import all_reduce
from gridtron.core.grid import Axis
from gridtron.core.kernels.backend import backend_of
from gridtron.core.kernels.blocks import as_rows
from gridtron.core.kernels.cross_entropy import ELSEWHERE, IGNORED, Statistics, statistics
from gridtron.core.kernels.cross_entropy import gradient as logits_gradient
from gridtron.core.once import differentiable_once
from gridtron.core.sharding import even_ranges


def vocab_parallel_cross_entropy(
    logits: Float[Tensor, "*batch share"],
    target: Int[Tensor, "*batch"],
    axis: Any = None,
    ignore_index: int = -100,
    inplace: bool = False,
    *,
    vocabulary: int | None = None,
    backend: str = "auto",
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
        backend: of the local passes: "triton", "torch" or "auto".

    Returns:
        (...) losses, a mean is the caller's: what counts may lie on other ranks.

    Raises:
        ValueError: shapes that do not match, or (on the CPU) a target outside the vocabulary, or an unknown backend.
    """
    axis = Axis.of(axis)
    backend = backend_of("cross_entropy", backend, logits)
    if inplace and logits.is_leaf and logits.requires_grad:
        raise ValueError(
            "inplace=True overwrites the logits, and these are a leaf that requires grad; give inplace=False"
        )
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} and target {tuple(target.shape)} must agree in all but the last dimension"
        )
    return _CrossEntropy.apply(logits, target, axis, ignore_index, inplace, vocabulary, backend)


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
        backend: str,
    ) -> Tensor:
        ctx.shape, ctx.dtype, ctx.backend = logits.shape, logits.dtype, backend
        # What torch keeps is its own: only Triton's gradient has no other place to go than over the logits.
        ctx.inplace = inplace and backend == "triton"
        # Detached: a view made here of a tensor that autograd tracks could not be changed in place.
        flat = as_rows(logits.detach())
        local = local_targets(target, flat.shape[1], axis, ignore_index, vocabulary)
        found = statistics(flat, local, inplace, backend)
        losses, factor = reduce_statistics(found, local, axis)
        ctx.save_for_backward(found.kept, found.maximum, factor, local)
        return losses.view(ctx.shape[:-1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        kept, maximum, factor, local = ctx.saved_tensors
        weight = gradient.reshape(-1).to(factor.dtype).masked_fill(local == IGNORED, 0)
        grad = logits_gradient(kept, maximum, weight * factor, weight, local, ctx.dtype, ctx.inplace, ctx.backend)
        return grad.view(ctx.shape), None, None, None, None, None, None


def local_targets(
    target: Int[Tensor, "*batch"], share: int, axis: Axis, ignore_index: int, vocabulary: int | None
) -> Int[Tensor, "rows"]:
    """Targets as indices in this rank's share of the vocabulary, ELSEWHERE or IGNORED.

    Raises:
        ValueError: a share that is not this rank's, or (on the CPU) a target outside the vocabulary.
    """
    if target.dtype.is_floating_point or target.dtype == torch.bool:
        raise ValueError(f"targets are token ids, whole numbers; given {target.dtype}")
    target = target.reshape(-1).long()
    start, total = _vocabulary_place(share, vocabulary, axis, target.device)
    ignored = target == ignore_index
    _check_targets(target, ignored, total)
    local = target - start
    return local.masked_fill_((local < 0) | (local >= share), ELSEWHERE).masked_fill_(ignored, IGNORED)


def reduce_statistics(
    found: Statistics, local: Int[Tensor, "rows"], axis: Axis
) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows"]]:
    """Two reductions: (losses, what exponents counted from this share's maximum are scaled by to be shares of one)."""
    maximum = all_reduce(found.maximum.clone(), axis, "max")
    # A row of -inf everywhere has no maximum to subtract; its loss is NaN all the same.
    shift = (found.maximum - maximum).exp_()
    sums = torch.stack([found.total * shift, (found.logit - maximum).masked_fill_(local < 0, 0)])
    all_reduce(sums, axis)
    losses = (sums[0].log() - sums[1]).masked_fill_(local == IGNORED, 0)
    return losses, shift / sums[0]


def _check_targets(target: Tensor, ignored: Tensor, vocabulary: int) -> None:
    """On the CPU a wrong target is named; on a device the look would wait for the queue, and a compiler for the run."""
    if target.device.type != "cpu" or target.numel() == 0 or torch.compiler.is_compiling():
        return
    wrong = ((target < 0) | (target >= vocabulary)) & ~ignored
    if bool(wrong.any()):
        value = int(target[wrong][0])
        raise ValueError(f"target {value} is outside the vocabulary of {vocabulary} (0 to {vocabulary - 1})")
