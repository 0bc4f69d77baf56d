"""The same numbers as a tensor of its own: no leaf and no view, so that an operation in place may follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Fresh(torch.autograd.Function):
    """Shares the memory of its input; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def no_views(value: Any) -> Any:
    """A module's output whose views that carry a gradient are tensors of their own."""
    if isinstance(value, Tensor):
        return Fresh.apply(value) if value.requires_grad and value._base is not None else value
    if type(value) in (tuple, list):
        return type(value)(no_views(item) for item in value)
    if type(value) is dict:
        return {key: no_views(item) for key, item in value.items()}
    return value
