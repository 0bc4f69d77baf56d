"""The only place for names that differ between the supported versions of torch, or are private in them.

Each is looked for, never assumed by version.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The documented way to see every operation lives in a private module; tests/parallel/test_layers.py fails if it moves.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


# ---------------------------------------------------------------- FSDP2
def fsdp_parameters(module: Any) -> list[Any]:
    """What FSDP2 keeps of each parameter of one module that it wraps: ``sharded_param``, ``unsharded_param``, and the
    gradient that waits for its reduction."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return [parameter for group in groups for parameter in group.fsdp_params]


def fsdp_can_defer() -> bool:
    """Whether gradients can be handed to FSDP2 after a backward pass and reduced then: it is private in torch."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_state

    state, parameter = getattr(_fsdp_state, "FSDPState", None), getattr(_fsdp_param, "FSDPParam", None)
    return (
        hasattr(FSDPModule, "_get_fsdp_state")
        and hasattr(state, "_root_post_backward_final_callback")
        and hasattr(state, "_lazy_init")
        and all(hasattr(parameter, name) for name in ("accumulate_unsharded_grad_if_needed", "unsharded_param"))
    )


def fsdp_add_gradient(parameter: Any, gradient: Tensor, dtype: torch.dtype) -> None:
    """Adds a gradient to those of an unsharded parameter (one of :func:`fsdp_parameters`) that are not reduced yet."""
    if parameter.unsharded_accumulated_grad is None:
        parameter.unsharded_accumulated_grad = gradient.to(dtype, copy=True)
    else:
        parameter.unsharded_accumulated_grad.add_(gradient)


def fsdp_reduce(root: Any) -> None:
    """Reduces the gradients of a root and all that it wraps now, as the end of a backward pass would."""
    state = root._get_fsdp_state()
    state._lazy_init()
    state._root_post_backward_final_callback()


# ---------------------------------------------------------------- functional collectives
def functional_all_reduce(tensor: Tensor, group: Any) -> Tensor:
    """The sum over a group as a new tensor: one operator, whose result a selective checkpoint can keep."""
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_reduce(tensor, "sum", group.group_name))


def functional_all_gather(tensor: Tensor, group: Any) -> Tensor:
    """The shares of the first dimension over a group, in rank order, as a new tensor."""
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_gather_into_tensor(tensor, group.size(), group.group_name))


def functional_reduce_scatter(tensor: Tensor, group: Any) -> Tensor:
    """This rank's share of the first dimension of the sum over a group, as a new tensor."""
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.reduce_scatter_tensor(tensor, "sum", group.size(), group.group_name))


# ---------------------------------------------------------------- torch.compile
def compile_graph(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """``function`` as one compiled graph for each kind of arguments; apart from other graphs of the same function where
    torch can keep them apart, so that one model's do not count against the limit of another's."""
    apart: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        apart["isolate_recompiles"] = True
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend, **apart)


def sees_every_operator() -> bool:
    """Whether a TorchDispatchMode is active: torch.compile does not compile then, and says so only as an error."""
    return bool(torch._C._len_torch_dispatch_stack()) if hasattr(torch._C, "_len_torch_dispatch_stack") else False


# ---------------------------------------------------------------- symmetric memory
def symmetric_memory_fault() -> str | None:
    """Why torch's fused products over symmetric memory cannot run here; None where they can."""
    if not torch.cuda.is_available():
        return "it needs CUDA devices that reach each other's memory, and there is none here"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")  # registers the operators
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory"
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    missing = [name for name in names if not hasattr(torch.ops.symm_mem, name)]
    return f"torch {torch.__version__} has no symm_mem::{missing[0]}" if missing else None


def fused_gather_products(
    share: Tensor, matrices: Sequence[Tensor], group: Any, keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """(the gathered share if ``keep``, the products of the gathered share and each matrix): one operator."""
    operator = torch.ops.symm_mem.fused_all_gather_matmul
    whole, products = operator(share, list(matrices), 0, group.group_name, return_A=keep)
    return whole if keep else None, products


def fused_product_scatter(x: Tensor, matrix: Tensor, group: Any) -> Tensor:
    """This rank's share of the first dimension of the sum of x @ matrix over a group: one operator."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, group.group_name)


__all__ = [
    "TorchDispatchMode",
    "all_gather_single",
    "compile_graph",
    "fsdp_add_gradient",
    "fsdp_can_defer",
    "fsdp_parameters",
    "fsdp_reduce",
    "functional_all_gather",
    "functional_all_reduce",
    "functional_reduce_scatter",
    "fused_gather_products",
    "fused_product_scatter",
    "gradient_shape",
    "norms_of",
    "reduce_scatter_single",
    "scale_",
    "sees_every_operator",
    "symmetric_memory_fault",
    "tree_leaves",
]
