"""NVIDIA apex's fused norms and causal softmax behind the operations' faces.

Written to the signatures of apex's source and tested on a stand-in that has them; not run on apex itself. Its AdamW is
``core.optim.apex``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def apex_rms_norm(
    x: Float[Tensor, "*batch features"], weight: Float[Tensor, "features"], eps: float
) -> Float[Tensor, "*batch features"]:
    """``apex.normalization.fused_layer_norm.fused_rms_norm_affine``; gains of another dtype than x go by the mixed one,
    whose result has theirs."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine, mixed_dtype_fused_rms_norm_affine

    if not x.numel():
        # A launch over no row is an error.
        return F.rms_norm(x, weight.shape, weight, eps)
    if weight.dtype == x.dtype:
        return fused_rms_norm_affine(x, weight, weight.shape, eps)
    return mixed_dtype_fused_rms_norm_affine(x, weight, weight.shape, eps).to(x.dtype)


def apex_layer_norm(
    x: Float[Tensor, "*batch features"],
    weight: Float[Tensor, "features"],
    bias: Float[Tensor, "features"] | None,
    eps: float,
) -> Float[Tensor, "*batch features"]:
    """``apex.normalization.fused_layer_norm.fused_layer_norm_affine``, which has a bias always: zeros where none is."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine, mixed_dtype_fused_layer_norm_affine

    if not x.numel():
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    bias = torch.zeros_like(weight) if bias is None else bias
    if weight.dtype == bias.dtype == x.dtype:
        return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
    return mixed_dtype_fused_layer_norm_affine(x, weight, bias, weight.shape, eps).to(x.dtype)


def takes_softmax(scores: Float[Tensor, "batch heads queries keys"]) -> bool:
    """Whether apex's causal softmax takes these scores: 16 bits, as many queries as keys, in numbers that its blocks
    divide (four rows of keys a block, eight where they are short)."""
    batch, heads, queries, keys = scores.shape
    narrow = scores.dtype in (torch.float16, torch.bfloat16)
    fits = queries == keys and 16 < keys <= 2048 and keys % 4 == 0
    return narrow and fits and batch * heads > 0 and batch * heads % (8 if keys <= 128 else 4) == 0


def apex_scaled_causal_softmax(
    scores: Float[Tensor, "batch heads queries keys"], scale: float
) -> Float[Tensor, "batch heads queries keys"]:
    """``apex.transformer.functional.fused_softmax.scaled_upper_triang_masked_softmax``.

    apex writes the gradient of the scores over that of the weights: whoever computes it must not need it again.
    """
    from apex.transformer.functional.fused_softmax import scaled_upper_triang_masked_softmax

    # Between the two stands a mask that apex does not look at.
    return scaled_upper_triang_masked_softmax(scores.contiguous(), None, scale)
