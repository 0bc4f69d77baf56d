"""Local passes of the cross-entropy over a share of the vocabulary; ``parallel.loss`` puts the reductions between them.

A share's exponents are counted from its own maximum, so that one pass gives all that the reductions need; what they
tell of the others' maximum is a factor on each row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gridtron.core.kernels.backend import backend_of, contiguous_like, launcher, register
from gridtron.core.kernels.blocks import row_blocks
from gridtron.core.precision import wide_dtype

ELSEWHERE = -1
"""In place of a local target: the target lies in another share."""
IGNORED = -2
"""In place of a local target: the row has no loss and no gradient, whatever its logits are."""


class Statistics(NamedTuple):
    """What a pass over the logits of a share finds; all but ``kept`` in the wide dtype, one number a row.

    Args:
        kept: for :func:`gradient`: exponents from torch, the logits themselves from Triton.
        maximum: largest logit, -inf where there is none.
        total: sum of exp(logits - maximum).
        logit: the target's, 0 where it is not in this share.
    """

    kept: Float[Tensor, "rows share"]
    maximum: Float[Tensor, "rows"]
    total: Float[Tensor, "rows"]
    logit: Float[Tensor, "rows"]


def statistics(
    logits: Float[Tensor, "rows share"], local: Int[Tensor, "rows"], inplace: bool = False, backend: str = "auto"
) -> Statistics:
    """Maximum, sum of exponents and the target's logit of each row.

    Args:
        logits: this share's.
        local: index of each row's target in this share, or ELSEWHERE or IGNORED.
        inplace: the logits are not needed again: their memory may be taken.

    Raises:
        ValueError: an unknown backend.
    """
    if backend_of("cross_entropy", backend, logits) == "triton":
        logits = logits if logits.stride(-1) == 1 or logits.shape[-1] <= 1 else logits.contiguous()
        return Statistics(logits, *_statistics_operator(logits, local))
    wide = wide_dtype(logits.dtype)
    rows, share = logits.shape
    if not share:
        none = logits.new_zeros(rows, dtype=wide)
        return Statistics(logits.to(wide), none.sub(float("inf")), none, none.clone())
    exponents = logits if inplace and logits.dtype == wide else torch.empty_like(logits, dtype=wide)
    maximum, total, logit = (logits.new_empty(rows, dtype=wide) for _ in range(3))
    places = local.clamp_min(0)
    for values, place, most, target, kept, whole in row_blocks(logits, places, maximum, logit, exponents, total):
        most.copy_(values.amax(-1))
        target.copy_(values.gather(1, place.unsqueeze(1)).squeeze(1))
        torch.sum(exponents_of(values, most, kept), -1, out=whole)
    return Statistics(exponents, maximum, total, logit.masked_fill_(local < 0, 0))


def exponents_of(
    logits: Float[Tensor, "rows share"], maximum: Float[Tensor, "rows"], out: Float[Tensor, "rows share"]
) -> Float[Tensor, "rows share"]:
    """exp(logits - maximum), written to ``out`` of the wide dtype, which the logits themselves may be."""
    # A row of -inf has no maximum to subtract: from 0 its exponents are the zeros that they are.
    base = maximum.masked_fill(maximum == float("-inf"), 0).unsqueeze(1)
    return torch.sub(logits, base, out=out).exp_()


def gradient(
    kept: Float[Tensor, "rows share"],
    maximum: Float[Tensor, "rows"],
    factor: Float[Tensor, "rows"],
    weight: Float[Tensor, "rows"],
    local: Int[Tensor, "rows"],
    dtype: torch.dtype,
    inplace: bool = False,
    backend: str = "auto",
) -> Float[Tensor, "rows share"]:
    """Gradient of the logits: ``exp(logits - maximum) * factor``, less ``weight`` at the target; 0 in ignored rows.

    Args:
        kept, maximum: as :func:`statistics` gives them.
        factor: ``weight`` over the sum of all shares' exponents, counted from this share's maximum.
        weight: gradient of each row's loss.
        local: as above.
        dtype: of the result.
        inplace: what is kept is not needed again.
    """
    if backend_of("cross_entropy", backend, kept) == "triton":
        if not inplace:
            return _gradient_operator(kept, maximum, factor, weight, local)
        _gradient_in_place(kept, maximum, factor, weight, local)
        return kept
    grad = kept if inplace and kept.dtype == dtype else torch.empty_like(kept, dtype=dtype)
    if not kept.shape[1]:
        return grad
    ignored = (local == IGNORED).unsqueeze(1)
    places, less = local.clamp_min(0).unsqueeze(1), weight.neg().masked_fill_(local < 0, 0).unsqueeze(1)
    for values, scale, place, one, none, out in row_blocks(kept, factor.unsqueeze(1), places, less, ignored, grad):
        scaled = torch.mul(values, scale, out=out) if out.dtype == values.dtype else values * scale
        # 0 x inf: an ignored row may hold anything, and its gradient is zero.
        scaled.masked_fill_(none, 0).scatter_add_(1, place, one)
        if scaled is not out:
            out.copy_(scaled)
    return grad


# ---------------------------------------------------------------- Triton
def _fake_statistics(logits: Tensor, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    wide = wide_dtype(logits.dtype)
    return logits.new_empty(rows, dtype=wide), logits.new_empty(rows, dtype=wide), logits.new_empty(rows, dtype=wide)


_statistics_operator = register(
    "cross_entropy_statistics",
    "(Tensor logits, Tensor local) -> (Tensor, Tensor, Tensor)",
    launcher("cross_entropy", "statistics"),
    _fake_statistics,
)
_gradient_operator = register(
    "cross_entropy_gradient",
    "(Tensor logits, Tensor maximum, Tensor factor, Tensor weight, Tensor local) -> Tensor",
    launcher("cross_entropy", "gradient"),
    lambda logits, maximum, factor, weight, local: contiguous_like(logits),
)
_gradient_in_place = register(
    "cross_entropy_gradient_",
    "(Tensor(a!) logits, Tensor maximum, Tensor factor, Tensor weight, Tensor local) -> ()",
    launcher("cross_entropy", "gradient_in_place"),
    lambda logits, maximum, factor, weight, local: None,
)
