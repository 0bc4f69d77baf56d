"""The whole model's state from any grid, under the names it has in one process, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gridtron.core.precision import wide_dtype
from gridtron.parallel.data_parallel.wrapper import DataParallel
from gridtron.parallel.linear import take_rows
from gridtron.parallel.parameters import gather_whole, named_parameters, sum_among_holders

if TYPE_CHECKING:
    from gridtron.core.grid import Grid


def full_state_dict(model: nn.Module, grid: Grid | None = None, of: str = "parameters") -> dict[str, Tensor]:
    """Every parameter, or every gradient, whole, on the CPU, on every rank.

    Names are those of the model in one process: wrappers and stages leave no trace, a tied weight stands once.
    Gradients are what the optimizer would get: reduced, before clipping, in float32 or wider; absent where there is
    none. Every rank of the grid must call it (it gathers).

    Args:
        model: a module, or one wrapped by DataParallel.
        grid: the model's grid; needed only where it has pipeline stages.
        of: "parameters" or "gradients".

    Raises:
        ValueError: another ``of``.
    """
    if of not in ("parameters", "gradients"):
        raise ValueError(f'of={of!r}: it is "parameters" or "gradients"')
    parameters = named_parameters(model)
    tensors: dict[str, Tensor] = {}
    if of == "parameters":
        tensors = {item.name: item.parameter.detach() for item in parameters}
    else:
        if isinstance(model, DataParallel):
            model.finish_step()
        wrapped = isinstance(model, DataParallel)
        for item in parameters:
            gradient = item.parameter.grad
            if isinstance(model, DataParallel):
                gradient = model.gradient(item.parameter)
            if gradient is not None:
                tensors[item.name] = gradient.detach().to(wide_dtype(gradient.dtype), copy=not wrapped)
        if not wrapped:
            sum_among_holders([(tensors[p.name], p.sharding, p.axis) for p in parameters if p.name in tensors])
    whole = {
        item.name: gather_whole(tensors[item.name], item.sharding, item.axis)
        for item in parameters
        if item.name in tensors
    }
    return {name: tensor.to("cpu", copy=True) for name, tensor in whole.items()}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], grid: Grid | None = None) -> None:
    """Puts each rank's rows of a whole state into ``model``; nothing is changed where anything does not fit.

    Raises:
        ValueError: missing or unexpected names, or a shape that differs, all of them listed.
    """
    parameters = named_parameters(model)
    known = {item.name: item for item in parameters}
    problems = [f"missing: {name}" for name in known if name not in state]
    problems += [f"unexpected: {name}" for name in state if name not in known]
    for name, item in known.items():
        if name in state and tuple(state[name].shape) != item.sharding.shape:
            problems.append(f"{name} has shape {tuple(state[name].shape)}, the model's is {item.sharding.shape}")
    if problems:
        shown = "\n  ".join(problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else []))
        raise ValueError(f"this state is not of this model:\n  {shown}")
    with torch.no_grad():
        for name, item in known.items():
            item.parameter.copy_(take_rows(state[name], item.sharding, item.axis.rank))
