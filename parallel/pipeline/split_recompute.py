"""Activation checkpointing inside a backward pass that is split: recomputed once, in the first half.

What the weights' gradients need of the recomputed pass is kept until the second half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import get_device_states, set_device_states

from gridtron.parallel.gradient_door import Deferral
from gridtron.parallel.pipeline.split_backward import backward_input


def split_checkpoint(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    parameters: Sequence[nn.Parameter],
    deferral: Deferral,
    again: Callable[[], AbstractContextManager[Any]],
) -> Any:
    """``function(*args)``, keeping ``args`` alone.

    Args:
        function: what is run now and once more in the first half of the backward pass.
        args: tensors, also inside tuples, lists and dictionaries, and anything else.
        parameters: all that ``function`` uses.
        deferral: watches them.
        again: the context of the second run.
    """
    tensors: list[Tensor] = []
    shape = _take_tensors(args, tensors)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    run = _Run(function, shape, len(tensors), trained, deferral, again)
    # The parameters are inputs too: the output needs a gradient where only they do.
    return run.unpack(_SplitCheckpoint.apply(run, *tensors, *trained))


class _Place(int):
    """Stands for a tensor in a nest of arguments: its number in the list."""


def _take_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value)(_take_tensors(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _take_tensors(item, tensors) for key, item in value.items()}
    return value


def _put_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    if type(value) in (tuple, list):
        return type(value)(_put_tensors(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _put_tensors(item, tensors) for key, item in value.items()}
    return value


class _Run:
    """One call of the function, to be repeated with the same random numbers."""

    def __init__(
        self,
        function: Callable[..., Any],
        shape: Any,
        count: int,
        parameters: list[nn.Parameter],
        deferral: Deferral,
        again: Callable[[], AbstractContextManager[Any]],
    ):
        self.function, self.shape, self.count = function, shape, count
        self.parameters, self.deferral, self.again = parameters, deferral, again
        self.output_shape: Any = None
        self.cpu_state = torch.get_rng_state()
        self.device_states: tuple[list[int], list[Tensor]] = ([], [])

    def first(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.device_states = get_device_states(*tensors)
        outputs: list[Tensor] = []
        # Without their history: whatever still has one inside was computed outside and is not an argument.
        args = _put_tensors(self.shape, [tensor.detach() for tensor in tensors])
        with _NoCaptures(self.function):
            self.output_shape = _take_tensors(self.function(*args), outputs)
        return tuple(outputs)

    def repeat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        devices, states = self.device_states
        kind = tensors[0].device.type if tensors else "cpu"
        with torch.random.fork_rng(devices=devices, device_type=kind if devices else "cuda"), self.again():
            torch.set_rng_state(self.cpu_state)
            set_device_states(devices, states)
            outputs: list[Tensor] = []
            _take_tensors(self.function(*_put_tensors(self.shape, tensors)), outputs)
        return outputs

    def unpack(self, outputs: Sequence[Tensor]) -> Any:
        return _put_tensors(self.output_shape, outputs)


class _NoCaptures(TorchFunctionMode):
    """Refuses operands whose gradient would be lost: the second run could not hand it to where they came from."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.name = getattr(function, "__qualname__", type(function).__name__)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(item, Tensor) and item.requires_grad and not item.is_leaf:
                    raise ValueError(
                        f"activation_checkpoint of {self.name} uses a tensor {tuple(item.shape)} that was computed "
                        "outside of it, and a schedule that splits the backward pass would lose its gradient: pass it "
                        "as an argument, as in activation_checkpoint(function, x, other)"
                    )
        return function(*args, **(kwargs or {}))


class _SplitCheckpoint(torch.autograd.Function):
    defers_weight_gradients = True

    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*tensors[: run.count])
        return run.first(tensors[: run.count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        run: _Run = ctx.run
        needs = ctx.needs_input_grad[1 : 1 + run.count]
        inputs = [
            tensor.detach().requires_grad_(tensor.requires_grad and need)
            for tensor, need in zip(ctx.saved_tensors, needs, strict=True)
        ]
        with torch.enable_grad():
            outputs = run.repeat(inputs)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        edges = [get_gradient_edge(output) for output, _ in pairs]
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        outer = run.deferral.take()
        found, work = backward_input(edges, [gradient for _, gradient in pairs], leaves, run.parameters, run.deferral)
        for item in (*outer, *work):
            run.deferral.push(item)
        gradient_of = dict(zip(leaves, found, strict=True))
        return None, *(gradient_of.get(tensor) for tensor in inputs), *(None for _ in run.parameters)
