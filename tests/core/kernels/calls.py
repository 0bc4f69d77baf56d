"""One table of calls of every kernel: for the interpreter, for compilation ahead of time and for a device.

A call makes its inputs (of a dtype, a size and on a device) and runs an operation on a backend; what it returns is held
against the same call on torch in float64. All inputs are drawn on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One operation.

    Args:
        operation: as the options call it.
        make: (shape, generator) -> float64 inputs on the CPU; those named in ``differentiated`` get gradients.
        run: (inputs, backend) -> the result.
        differentiated: names of inputs.
        shapes: odd, small ones for the interpreter.
        large: one in use, for a compiler and a device.
    """

    operation: str
    make: Callable[[tuple[int, ...], torch.Generator], Inputs]
    run: Callable[[Inputs, str], Tensor]
    differentiated: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    large: tuple[int, ...]


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# ---------------------------------------------------------------- norms
def _norm_inputs(shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    width = shape[-1:]
    return {"x": normal(shape, generator), "weight": normal(width, generator), "bias": normal(width, generator)}


def _rms_norm(inputs: Inputs, backend: str) -> Tensor:
    from gridtron.core.kernels.rms_norm import rms_norm

    return rms_norm(inputs["x"], inputs["weight"], 1e-5, backend)


def _layer_norm(inputs: Inputs, backend: str) -> Tensor:
    from gridtron.core.kernels.layer_norm import layer_norm

    return layer_norm(inputs["x"], inputs["weight"], inputs.get("bias"), 1e-5, backend)


ROWS = ((37, 101), (3, 5, 16), (1, 7), (4, 1), (0, 8), (2, 0, 3))

CALLS: Mapping[str, Call] = {
    "rms_norm": Call("rms_norm", _norm_inputs, _rms_norm, ("x", "weight"), ROWS, (8192, 4096)),
    "layer_norm": Call("layer_norm", _norm_inputs, _layer_norm, ("x", "weight", "bias"), ROWS, (8192, 4096)),
}


# ---------------------------------------------------------------- running them
def inputs_of(call: Call, shape: tuple[int, ...], dtype: torch.dtype, device: Any = "cpu", seed: int = 0) -> Inputs:
    """Inputs of a dtype on a device; numbers that are not floats stay as they are."""
    made = call.make(shape, torch.Generator().manual_seed(seed))
    return {name: _put(value, dtype, device) for name, value in made.items()}


def _put(value: Any, dtype: torch.dtype, device: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Strides are part of the call: an expanded or transposed input stays one.
    if value.is_floating_point():
        value = value.to(dtype)
    return value.to(device)


def results(call: Call, inputs: Inputs, backend: str, seed: int = 1) -> dict[str, Tensor]:
    """The result and the gradients of a call under a random gradient of the result."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in call.differentiated}
    result = call.run({**inputs, **leaves}, backend)
    found = {"result": result.detach()}
    if leaves:
        given = torch.randn(result.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        gradients = torch.autograd.grad(result, list(leaves.values()), given.to(result.dtype).to(result.device))
        found.update({f"gradient of {name}": one for name, one in zip(leaves, gradients, strict=True)})
    return found


def reference(call: Call, inputs: Inputs) -> dict[str, Tensor]:
    """The same numbers through torch in float64 on the CPU: rounded inputs are not counted as an error."""
    exact = {
        name: value.cpu().double() if isinstance(value, Tensor) and value.is_floating_point() else _cpu(value)
        for name, value in inputs.items()
    }
    return results(call, exact, "torch")


def _cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Relative Euclidean norm of each difference; where the truth is zero but for noise, against the largest."""
    assert found.keys() == expected.keys()
    least = 1e-3 * max(float(theirs.double().norm()) for theirs in expected.values())
    for name, theirs in expected.items():
        ours = found[name].cpu().double()
        assert ours.shape == theirs.shape, name
        error = float((ours - theirs.double()).norm())
        bound = tolerance * max(float(theirs.double().norm()), least)
        assert error <= bound, f"{name}: error {error:.2e} over {bound:.2e}"
