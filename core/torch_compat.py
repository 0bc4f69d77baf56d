"""The only place for names that differ between the supported versions of torch, or are private in them.

Each is looked for, never assumed by version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The documented way to see every operation lives in a private module; tests/parallel/test_layers.py fails if it moves.
from torch.utils._python_dispatch import TorchDispatchMode

# Renamed in torch 2.13, where the old names warn.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, in one pass over all where torch has it."""
    if hasattr(torch, "_foreach_norm"):
        return list(torch._foreach_norm(list(tensors)))
    return [torch.linalg.vector_norm(tensor) for tensor in tensors]


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """In place: every tensor times ``factor``."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def gradient_shape(node: Any, number: int) -> torch.Size | None:
    """The shape of the gradient that a node of autograd's graph takes at input ``number``; None where it is not told.

    Autograd sums a gradient that is broadcast to this shape on the way in; who calls a node by hand must do so too.
    """
    if hasattr(node, "variable"):
        shape: torch.Size = node.variable.shape
        return shape
    metadata = getattr(node, "_input_metadata", None)
    return None if metadata is None else torch.Size(metadata[number].shape)


__all__ = ["TorchDispatchMode", "all_gather_single", "gradient_shape", "norms_of", "reduce_scatter_single", "scale_"]
