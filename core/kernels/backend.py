"""What every operation's file shares: which implementation a call takes, and how operators are registered."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gridtron.core.kernels.config import AVAILABLE

# A registration, not state: operators live as long as the library that defines them.
_LIBRARY = torch.library.Library("gridtron", "FRAGMENT")


def register(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """An operator ``gridtron::name``, opaque to torch.compile and known by name to selective checkpoints.

    Args:
        schema: arguments and results, as ``(Tensor x, float eps) -> Tensor``; results never alias arguments.
        implementation: runs it, on any device, without autograd.
        fake: the results' shapes and dtypes alone, for tracing.
    """
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gridtron::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.gridtron, name).default


def backend_of(operation: str, backend: str, x: Tensor) -> str:
    """Which implementation a call takes: ``backend``, or for "auto" Triton on CUDA where it is installed, else torch.

    A run decides once, by :func:`gridtron.core.kernels.config.choose`; this serves calls in code of one's own.

    Raises:
        ValueError: an implementation that the operation does not have.
    """
    if backend == "torch":
        return backend
    if backend == "auto":
        return "triton" if x.is_cuda and importlib.util.find_spec("triton") is not None else "torch"
    if backend not in AVAILABLE[operation]:
        names = ", ".join(("auto", *AVAILABLE[operation]))
        raise ValueError(f"backend={backend!r}: {operation} has {names}")
    return backend
