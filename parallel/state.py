"""The whole model's state from any grid, under the names it has in one process, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gridtron.core.communication import broadcast_from, gather_values
from gridtron.core.grid import Axis
from gridtron.core.pieces import gather_whole
from gridtron.core.precision import wide_dtype
from gridtron.parallel.data_parallel.fsdp import whole_rows
from gridtron.parallel.data_parallel.wrapper import DataParallel
from gridtron.parallel.parameters import (
    NamedParameter,
    named_parameters,
    sum_among_copies,
    sum_among_holders,
    unwrap,
)
from gridtron.parallel.weights import HeldWeights, load_weights

if TYPE_CHECKING:
    from gridtron.core.grid import Grid


def full_state_dict(model: nn.Module, grid: Grid | None = None, of: str = "parameters") -> dict[str, Tensor]:
    """Every parameter, or every gradient, whole, on the CPU, on every rank.

    Names are those of the model in one process: wrappers and stages leave no trace, a tied weight stands once.
    Gradients are what the optimizer would get: reduced, before clipping, in float32 or wider; absent where there is
    none. Every rank of the grid must call it (it gathers).

    Args:
        model: a module, or one wrapped by DataParallel.
        grid: the model's grid, where its stages lie on several pipeline ranks; without it this rank's stages alone.
        of: "parameters" or "gradients".

    Raises:
        ValueError: another ``of``.
    """
    if of not in ("parameters", "gradients"):
        raise ValueError(f'of={of!r}: it is "parameters" or "gradients"')
    if isinstance(model, DataParallel):
        model.reshard()
    parameters = named_parameters(model)
    tensors = _gradients(model, parameters) if of == "gradients" else _parameters(model, parameters)
    whole = {
        item.name: gather_whole(tensors[item.name], item.sharding, item.axis)
        for item in parameters
        if item.name in tensors
    }
    if grid is not None and grid.pipeline.size > 1:
        whole = _gather_stages(model, parameters, whole, grid.pipeline)
    return {name: tensor.to("cpu", copy=True) for name, tensor in whole.items()}


def _parameters(model: nn.Module, parameters: list[NamedParameter]) -> dict[str, Tensor]:
    """This rank's rows by name, put together where data ranks cut them."""
    if isinstance(model, DataParallel):
        model.gather_parameters()
    return {item.name: whole_rows(item.parameter) for item in parameters}


def _gradients(model: nn.Module, parameters: list[NamedParameter]) -> dict[str, Tensor]:
    """This rank's rows, by name, in the wide dtype, summed over all that have a part in them."""
    found: dict[str, Tensor] = {}
    if isinstance(model, DataParallel):
        model.finish_step()
        for item in parameters:
            gradient = model.gradient(item.parameter)
            if gradient is not None:
                found[item.name] = model.piece(item).gather(gradient.detach().to(wide_dtype(gradient.dtype)))
        return found
    for item in parameters:
        if item.parameter.grad is not None:
            gradient = whole_rows(item.parameter, "gradients")
        elif item.copies is not None and item.parameter.requires_grad:
            # The stage that shares it waits to sum.
            gradient = torch.zeros_like(whole_rows(item.parameter))
        else:
            continue
        found[item.name] = gradient.to(wide_dtype(gradient.dtype), copy=True)
    sum_among_holders([(found[p.name], p.sharding, p.axis) for p in parameters if p.name in found])
    sum_among_copies([(found[p.name], p.copies) for p in parameters if p.name in found and p.copies is not None])
    return found


def _gather_stages(
    model: nn.Module, parameters: list[NamedParameter], own: dict[str, Tensor], axis: Axis
) -> dict[str, Tensor]:
    """What the stages of all pipeline ranks hold, in the order of the stages: that of the model in one process."""
    stage_of: dict[nn.Parameter, int] = {}
    stages: Mapping[int, nn.Module] = getattr(unwrap(model), "stages", {})
    for stage in sorted(stages):
        for parameter in stages[stage].parameters():
            stage_of.setdefault(parameter, stage)
    told = [
        (stage_of.get(item.parameter, axis.rank), item.name, tuple(own[item.name].shape), own[item.name].dtype)
        for item in parameters
        if item.name in own
    ]
    # A parameter that several stages share comes from the first of them, and stands there.
    first: dict[str, tuple[int, int]] = {}
    gathered = gather_values(told, axis)
    for source, items in enumerate(gathered):
        for stage, name, _, _ in items:
            first[name] = min(first.get(name, (stage, source)), (stage, source))
    device = next((tensor.device for tensor in own.values()), torch.device("cpu"))
    found: dict[str, Tensor] = {}
    for source, items in enumerate(gathered):
        sent = {
            name: own[name].contiguous() if source == axis.rank else torch.empty(shape, dtype=dtype, device=device)
            for _, name, shape, dtype in items
            if first[name][1] == source
        }
        broadcast_from(list(sent.values()), axis, source)
        found |= sent
    return {name: found[name] for name in sorted(found, key=lambda name: first[name][0])}


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Tensor], grid: Grid | None = None, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Puts each rank's rows of a whole state into ``model``; nothing is changed where anything does not fit.

    Every pipeline rank of ``grid`` must call it: together they must know every name.

    Args:
        model: a module, or one wrapped by DataParallel.
        state: name -> whole tensor, as :func:`full_state_dict` gives it.
        grid: the model's grid, where its stages lie on several pipeline ranks.
        strict: False: parameters that ``state`` lacks keep their values, and names that the model lacks are left out.

    Returns:
        Missing and unexpected names, on every rank alike; both empty where ``strict``.

    Raises:
        ValueError: a shape that differs and, where ``strict``, missing or unexpected names: all of them listed, on
            every rank alike.
    """
    return load_weights(model, HeldWeights(state), grid, strict=strict)
