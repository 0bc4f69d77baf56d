"""What every operation's file shares: which implementation a call takes, and how operators are registered."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gridtron.core.kernels.config import AVAILABLE

MAXIMUM_COLUMNS = 16384
"""Numbers of one row that a program of Triton holds at once; longer rows are torch's, where the whole row is needed."""

# A registration, not state: operators live as long as the library that defines them.
_LIBRARY = torch.library.Library("gridtron", "FRAGMENT")


def register(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
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


def launcher(file: str, function: str) -> Callable[..., Any]:
    """A function of ``triton_kernels/file.py``, imported when it is first called, for Triton takes a second; it runs
    with the device of its first argument as the current one, where Triton launches."""

    def launch(x: Tensor, *arguments: Any) -> Any:
        run = getattr(importlib.import_module(f"gridtron.core.kernels.triton_kernels.{file}"), function)
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return run(x, *arguments)
        with torch.cuda.device(x.device):
            return run(x, *arguments)

    return launch


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
    check_backend(operation, backend)
    return backend


def check_backend(operation: str, backend: str) -> None:
    """
    Raises:
        ValueError: an implementation that the operation does not have, with those that it has.
    """
    if backend not in ("auto", *AVAILABLE[operation]):
        names = ", ".join(("auto", *AVAILABLE[operation]))
        raise ValueError(f"backend={backend!r}: {operation} has {names}")


def row_backend(operation: str, backend: str, x: Tensor) -> str:
    """:func:`backend_of` for an operation whose kernels hold a whole row of ``x``."""
    chosen = backend_of(operation, backend, x)
    return "torch" if chosen == "triton" and x.shape[-1] > MAXIMUM_COLUMNS else chosen


def asked(gradients: tuple[Tensor, ...], wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """What autograd is to be told: None in place of a gradient that nobody asked for (an operator returns it empty)."""
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, wanted, strict=True))


def contiguous_like(x: Tensor, needed: bool = True) -> Tensor:
    """An uninitialised contiguous tensor of the shape of x, or an empty one."""
    return torch.empty_like(x, memory_format=torch.contiguous_format) if needed else x.new_empty(0)


def require(holds: bool, operation: str, rule: str, **tensors: Tensor | None) -> None:
    """What a kernel takes for granted: it would read beyond a tensor that is smaller than it believes.

    Raises:
        ValueError: unless ``holds``, with the rule and what was given.
    """
    if not holds:
        given = ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items() if t is not None)
        raise ValueError(f"{operation} takes {rule}; given {given}")
