"""Which operators of a layer a selective checkpoint keeps and which it runs again, by name; without torch.

A layer under :func:`keep_all_but` is run again in the backward pass, but for the results of its costly operators, which
are kept: products, attention, dropout (whose masks are counted, not cheap), reductions over the tensor axis. What a
list of operations names is run again too. Everything elementwise (norms, rotations, activations, sums) always is: it
takes little time, and its results are a layer's memory (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.checkpoint import CheckpointPolicy

KEPT: Mapping[str, tuple[str, ...]] = {
    "product": ("aten.mm", "aten.addmm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten.bmm",
        "gridtron.scaled_masked_softmax",
        "aten._softmax",
        "aten._safe_softmax",
    ),
    # Triton's is one operator for both, with a residual and without.
    "dropout": ("gridtron.counted_dropout", "gridtron.dropout_add"),
    # Gathers are not among them: a gathered activation is what sequence parallelism does not hold.
    "reduction": ("_c10d_functional.all_reduce", "_c10d_functional.reduce_scatter_tensor"),
}
"""Group -> its operators, each a schema's name without overload."""

ELEMENTWISE = (
    "aten.native_layer_norm",
    "aten.silu",
    "aten.gelu",
    "aten.relu",
    "aten.mul",
    "aten.add",
    "aten.rsqrt",
    "aten.masked_fill",
)
"""What is run again whatever is listed, by the names that people would look for."""

_ALWAYS = ("norm", "activation", "rope", "elementwise")


def known_operations() -> tuple[str, ...]:
    """Every name that a list of operations may hold: groups first."""
    return (*KEPT, *_ALWAYS, *(name for names in KEPT.values() for name in names), *ELEMENTWISE)


def operations_fault(operations: Collection[str]) -> str | None:
    """Why a list of operations is not one; None where it is.

    Example:
        >>> operations_fault(["aten.mmm"])
        "'aten.mmm' is no operation of a layer; nearest: aten.mm"
    """
    known = known_operations()
    groups = ", ".join((*KEPT, *_ALWAYS))
    faults = []
    for name in dict.fromkeys(operations):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.4)
            hint = f"nearest: {near[0]}" if near else f"give {groups}, or an operator of torch as aten.mm"
            faults.append(f"{name!r} is no operation of a layer; {hint}")
    return "; ".join(faults) or None


def kept_operators(operations: Collection[str]) -> frozenset[str]:
    """Names of the operators whose results are kept where ``operations`` are recomputed.

    Raises:
        ValueError: a name that is not known, with the nearest.
    """
    if fault := operations_fault(operations):
        raise ValueError(f"operations={list(operations)}: {fault}")
    return frozenset(
        name for group, names in KEPT.items() if group not in operations for name in names if name not in operations
    )


def forward_sum(operations: Collection[str]) -> str:
    """How row-parallel layers inside of a checkpoint sum their product over the axis (TensorParallelLinear): a product
    is let go where both it and its sum are kept, and then never read again."""
    kept = kept_operators(operations)
    sums = set(KEPT["reduction"]) | set(KEPT["product"])
    return "release" if sums <= kept else "new"


def keep_all_but(operations: Collection[str]) -> Callable[..., CheckpointPolicy]:
    """A policy for torch's selective checkpoints that keeps the results of all costly operators but ``operations``."""
    from torch.utils.checkpoint import CheckpointPolicy

    kept = kept_operators(operations)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = f"{operator.namespace}.{operator.__name__.partition('.')[0]}"
        # What an operator wrote into a tensor that it was given (a product in pieces) would not be written again.
        keep = name in kept and not operator._schema.is_mutable
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
