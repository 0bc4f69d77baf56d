"""Which modules FSDP2 wraps, and which parameters it cannot hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from torch import nn

from gridtron.parallel.fresh import no_views

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def roots_of(module: nn.Module) -> dict[Hashable, nn.Module]:
    """What is called as a whole: the stages of a module that has some, else the module."""
    stages = getattr(module, "stages", None)
    if isinstance(stages, Mapping) and stages and all(isinstance(item, nn.Module) for item in stages.values()):
        return dict(stages)
    return {None: module}


def units_of(root: nn.Module) -> list[nn.Module]:
    """What is gathered one by one: the items of the outermost lists, dictionaries and sequences of modules."""
    found: list[nn.Module] = []

    def look(module: nn.Module, inside: bool) -> None:
        for child in module.children():
            container = isinstance(child, _CONTAINERS)
            if not inside or container:
                look(child, container)
            elif child not in found:
                found.append(child)

    look(root, isinstance(root, _CONTAINERS))
    return found


def not_for_fsdp(roots: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Parameters that FSDP2 cannot hold: of several units (tied weights), of no dimension, of no element."""
    owners: dict[nn.Parameter, set[int]] = {}
    for root in roots:
        unit_of = {module: unit for unit in units_of(root) for module in unit.modules()}
        for module in root.modules():
            for item in module.parameters(recurse=False):
                owners.setdefault(item, set()).add(id(unit_of.get(module, root)))
    return {item for item, where in owners.items() if len(where) > 1 or item.ndim == 0 or item.numel() == 0}


def wrap(root: nn.Module, mesh: Any, policy: Any, ignored: set[nn.Parameter]) -> list[Any]:
    """Wraps the units of a root, then what is left; those that were wrapped."""
    from torch.distributed.fsdp import fully_shard

    found = [unit for unit in units_of(root) if any(item not in ignored for item in unit.parameters())]
    wrapped: list[Any] = []
    for module in [*found, *([root] if any(True for _ in root.parameters()) else [])]:
        # Before FSDP2's own hook, which an operation in place on a view would lose.
        module.register_forward_hook(_without_views)
        made: Any = fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        # The sum is plain: FSDP2 would divide it by the number of ranks.
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
        if hasattr(made, "set_reduce_scatter_unused_params"):
            # A parameter that is used on another rank only must be reduced here as well.
            made.set_reduce_scatter_unused_params(True)
        wrapped.append(made)
    return wrapped


def _without_views(module: nn.Module, arguments: Any, output: Any) -> Any:
    return no_views(output)
