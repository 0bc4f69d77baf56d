"""Derivatives that are made by hand and cannot be differentiated again: an error, not a wrong number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward pass of an autograd Function: refuses ``create_graph=True``.

    torch's ``once_differentiable`` marks the result, and ``torch.autograd.grad`` goes round the mark where it asks for
    a tensor that can be reached another way: the second derivative then lacks a part without a word.

    Raises:
        RuntimeError: the pass is asked for a graph of its own.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            name = backward.__qualname__.partition(".")[0].strip("_")
            raise RuntimeError(
                f"{name} is differentiable once, and create_graph=True asks for a gradient that can be differentiated "
                "again; use torch's own operations for that"
            )
        return backward(ctx, *gradients)

    return once
