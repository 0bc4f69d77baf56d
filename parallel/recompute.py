"""Activation checkpointing: what is recomputed in the backward pass instead of kept.

Chen et al. 2016 (arXiv:1604.06174); "selective" recomputes the attention core alone (Korthikanti et al. 2022,
arXiv:2205.05198, section 5), or the operations of a list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gridtron.core.options import option
from gridtron.parallel.gradient_door import deferral_of

if TYPE_CHECKING:
    # The command line reads the options above without torch.
    from torch import nn

    from gridtron.parallel.dropout import Dropout


@dataclass(frozen=True)
class RecomputeConfig:
    mode: str = option(
        "none",
        "what is recomputed: nothing, the attention core, whole layers, or the least that fits budget_bytes",
        choices=("none", "selective", "full", "auto"),
    )
    layers: int | None = option(None, "full: only the first so many layers of each stage; null: all", minimum=0)
    operations: list[str] | None = option(
        None,
        "selective: recompute these, and everything elementwise, and keep the rest of a layer: groups (product, "
        "attention, dropout, reduction) or operators of torch (aten.mm); null: the attention core alone",
    )
    budget_bytes: int | None = option(None, "auto: what a rank may hold at a step's peak, in bytes", minimum=1)


LAYER_POLICIES = ("none", "selective", "operations", "full")


def layer_policies(config: RecomputeConfig, count: int) -> tuple[str, ...]:
    """Of each of a stage's ``count`` layers, in order, one of LAYER_POLICIES; "selective" is the attention core."""
    if config.mode == "full":
        whole = count if config.layers is None else min(config.layers, count)
        return ("full",) * whole + ("none",) * (count - whole)
    if config.mode == "selective" and config.operations is not None:
        return ("operations",) * count
    assert config.mode != "auto", "a choice is made by gridtron.models.cost.choice before layers are"
    return (config.mode,) * count


def activation_checkpoint(function: Callable[..., Any], *args: Any, policy: str | Collection[str] = "full") -> Any:
    """``function(*args)``, keeping ``args`` instead of what happens inside; the backward pass runs it again.

    Dropout inside draws the masks of the first run: a SampleContext among the arguments says which; without one the
    call counters of the Dropout modules that ``function`` holds are set back for the second run.

    Args:
        function: a module, or a callable that closes over modules.
        args: tensors and anything else.
        policy: "full" recomputes; "none" calls the function; a list of operations recomputes those and everything
            elementwise and keeps the results of all other costly operators (:mod:`gridtron.parallel.operations`).
            Row-parallel layers inside must then be made with ``forward_sum="new"``: a kept product must not be summed
            in place, and again when it is used again.

    Raises:
        ValueError: an unknown policy or operation; a list under a schedule that splits the backward pass.
    """
    if policy == "none":
        return function(*args)
    if isinstance(policy, str) and policy != "full":
        raise ValueError(f'policy={policy!r}: it is "full" (recompute), "none", or a list of operations')
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    if torch.compiler.is_compiling() and policy == "full":
        # Masks belong to samples there (a SampleContext), and nothing is deferred: there is nothing to set back.
        return checkpoint(function, *args, use_reentrant=False)

    from gridtron.parallel.dropout import Dropout
    from gridtron.parallel.operations import keep_all_but

    modules = _modules(function, args)
    counters = [module for module in modules if isinstance(module, Dropout)]
    before = [module.calls for module in counters]

    selected = None if isinstance(policy, str) else keep_all_but(policy)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        back = _CountersSetBack(counters, before)
        if selected is None:
            return nullcontext(), back
        first, again = create_selective_checkpoint_contexts(selected)
        return first, _Both(back, again)

    parameters = list({parameter: None for module in modules for parameter in module.parameters()})
    for parameter in parameters:
        deferral = deferral_of(parameter)
        if deferral is not None and selected is not None:
            raise ValueError(
                f"policy={list(policy)}: a list of operations does not go with a schedule that splits the backward "
                'pass; give policy="full", or a schedule without I and W'
            )
        if deferral is not None:
            from gridtron.parallel.pipeline.split_recompute import split_checkpoint

            return split_checkpoint(function, args, parameters, deferral, lambda: contexts()[1])
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


class _Both:
    """Two contexts as one, which may be entered again."""

    def __init__(self, outer: Any, inner: Any):
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.inner.__exit__(*exception)
        self.outer.__exit__(*exception)


class _CountersSetBack:
    """The Dropout modules count as before the first run while a further one goes on; it may be entered again."""

    def __init__(self, counters: list[Dropout], before: list[int]):
        self.counters, self.before = counters, before
        self.after: list[int] = []

    def __enter__(self) -> None:
        self.after = [module.calls for module in self.counters]
        self._set(self.before)

    def __exit__(self, *exception: object) -> None:
        self._set(self.after)

    def _set(self, calls: list[int]) -> None:
        for module, number in zip(self.counters, calls, strict=True):
            module.calls = number


def _modules(function: Any, args: tuple[Any, ...] = ()) -> list[nn.Module]:
    """Modules that a callable runs: itself, its owner, what it closes over, and modules among the arguments."""
    from torch import nn

    found: dict[int, nn.Module] = {}

    def look(value: Any) -> None:
        if isinstance(value, nn.Module):
            found.update((id(module), module) for module in value.modules())
        elif isinstance(value, functools.partial):
            for inner in (value.func, *value.args, *value.keywords.values()):
                look(inner)
        elif isinstance(value, (tuple, list)):
            for inner in value:
                look(inner)
        elif isinstance(value, Mapping):
            look(list(value.values()))
        elif callable(value):
            if isinstance(getattr(value, "__self__", None), nn.Module):
                look(value.__self__)
            for cell in getattr(value, "__closure__", None) or ():
                if isinstance(cell.cell_contents, (nn.Module, tuple, list, Mapping)):
                    look(cell.cell_contents)

    for value in (function, *args):
        look(value)
    return list(found.values())
