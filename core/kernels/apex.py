"""NVIDIA apex's fused norms and causal softmax behind the operations' faces.

Written to the signatures of apex's source and tested on a stand-in that has them; not run on apex itself. Its AdamW is
``core.optim.apex``.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def _of_apex(module: str, *names: str) -> list[Any]:
    """Functions of a module of apex, imported when they are first called.

    Raises:
        ValueError: NVIDIA's apex is not installed.
    """
    try:
        found = importlib.import_module(f"apex.{module}")
        return [getattr(found, name) for name in names]
    except (ImportError, AttributeError) as fault:
        raise ValueError(f"backend='apex': NVIDIA's apex is not installed ({fault}); give torch, or auto") from None


def apex_rms_norm(
    x: Float[Tensor, "*batch features"], weight: Float[Tensor, "features"], eps: float
) -> Float[Tensor, "*batch features"]:
    """``apex.normalization.fused_layer_norm.fused_rms_norm_affine``; gains of another dtype than x go by the mixed one,
    whose result has theirs."""
    names = "fused_rms_norm_affine", "mixed_dtype_fused_rms_norm_affine"
    alike, mixed = _of_apex("normalization.fused_layer_norm", *names)

    if not x.numel():
        # A launch over no row is an error.
        return F.rms_norm(x, weight.shape, weight, eps)
    if weight.dtype == x.dtype:
        return alike(x, weight, weight.shape, eps)
    return mixed(x, weight, weight.shape, eps).to(x.dtype)


def apex_layer_norm(
    x: Float[Tensor, "*batch features"],
    weight: Float[Tensor, "features"],
    bias: Float[Tensor, "features"] | None,
    eps: float,
) -> Float[Tensor, "*batch features"]:
    """``apex.normalization.fused_layer_norm.fused_layer_norm_affine``, which has a bias always: zeros where none is."""
    names = "fused_layer_norm_affine", "mixed_dtype_fused_layer_norm_affine"
    alike, mixed = _of_apex("normalization.fused_layer_norm", *names)

    if not x.numel():
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    bias = torch.zeros_like(weight) if bias is None else bias
    if weight.dtype == bias.dtype == x.dtype:
        return alike(x, weight, bias, weight.shape, eps)
    return mixed(x, weight, bias, weight.shape, eps).to(x.dtype)


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
    (softmax,) = _of_apex("transformer.functional.fused_softmax", "scaled_upper_triang_masked_softmax")
    # Between the two stands a mask that apex does not look at.
    return softmax(scores.contiguous(), None, scale)
