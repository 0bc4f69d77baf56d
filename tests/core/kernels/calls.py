"""One table of calls of every kernel: for the interpreter, for compilation ahead of time and for a device.

A call makes its inputs (of a dtype, a size and on a device) and runs an operation on a backend; what it returns is held
against the same call on torch in float64. All inputs are drawn on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
        large: in use, for a device.
    """

    operation: str
    make: Callable[[tuple[int, ...], torch.Generator], Inputs]
    run: Callable[[Inputs, str], Tensor]
    differentiated: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    large: tuple[int, ...]

    @property
    def compiled(self) -> tuple[int, ...]:
        """As ``large`` with less around the last dimension: what is compiled is the same."""
        return (*(min(size, 16) for size in self.large[:-1]), self.large[-1])


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


# ---------------------------------------------------------------- rotary positions
def _rope_inputs(shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    """(sequence, batch, heads, width), as a projection gives it, seen as (batch, heads, sequence, width); a quarter of
    an odd width stays as it is."""
    length, _, _, width = shape
    half = width // 2 if width % 4 == 0 else width * 3 // 8
    angles = normal((length, half), generator)
    return {"x": normal(shape, generator).permute(1, 2, 0, 3), "cos": angles.cos(), "sin": angles.sin()}


def _rope(inputs: Inputs, backend: str) -> Tensor:
    from gridtron.core.kernels.rope import rope

    return rope(inputs["x"], inputs["cos"], inputs["sin"], backend)


# ---------------------------------------------------------------- activations
def _swiglu_inputs(shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    """Halves of one tensor."""
    gate, up = (3 * normal((*shape[:-1], 2 * shape[-1]), generator)).chunk(2, -1)
    return {"gate": gate, "up": up}


def _apart_inputs(shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    return {"gate": normal(shape, generator), "up": normal(shape, generator)}


def _swiglu(inputs: Inputs, backend: str) -> Tensor:
    from gridtron.core.kernels.swiglu import swiglu

    return swiglu(inputs["gate"], inputs["up"], backend)


def _bias_gelu(approximate: str, bias: bool = True) -> Callable[[Inputs, str], Tensor]:
    def run(inputs: Inputs, backend: str) -> Tensor:
        from gridtron.core.kernels.bias_gelu import bias_gelu

        return bias_gelu(inputs["x"], inputs["bias"] if bias else None, approximate, backend)

    return run


# ---------------------------------------------------------------- attention
def _scores(shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    """Scores, and a mask that leaves nothing of the first query."""
    mask = torch.rand(shape[0], 1, *shape[2:], generator=generator) < 0.3
    mask[:, :, :1] = True
    return {"scores": 5 * normal(shape, generator), "mask": mask}


def _softmax(causal: bool, mask: bool) -> Callable[[Inputs, str], Tensor]:
    def run(inputs: Inputs, backend: str) -> Tensor:
        from gridtron.core.kernels.scaled_masked_softmax import scaled_masked_softmax

        return scaled_masked_softmax(inputs["scores"], 0.3, causal, inputs["mask"] if mask else None, backend)

    return run


# ---------------------------------------------------------------- losses
def _loss_inputs(shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    """Half of the targets ignored; logits of one such row hold what no loss may see."""
    rows, vocabulary = shape
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    target[1::2] = -100
    logits = 5 * normal(shape, generator)
    logits[1:2] = float("nan")
    logits[3:4, ::2] = float("inf")
    return {"logits": logits, "target": target}


def _loss(inplace: bool) -> Callable[[Inputs, str], Tensor]:
    def run(inputs: Inputs, backend: str) -> Tensor:
        from gridtron.parallel.loss import vocab_parallel_cross_entropy

        # What is overwritten must be nobody's.
        logits = inputs["logits"] * 1 if inplace else inputs["logits"]
        return vocab_parallel_cross_entropy(logits, inputs["target"], inplace=inplace, backend=backend)

    return run


def _linear_loss_inputs(shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    rows, vocabulary = shape
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    target[1::2] = -100
    return {"x": normal((rows, 32), generator), "weight": normal((vocabulary, 32), generator), "target": target}


def _linear_loss(inputs: Inputs, backend: str) -> Tensor:
    from gridtron.parallel.linear_loss import vocab_parallel_linear_cross_entropy

    return vocab_parallel_linear_cross_entropy(
        inputs["x"], inputs["weight"], inputs["target"], chunk=max(1, len(inputs["x"]) // 2), backend=backend
    )


# ---------------------------------------------------------------- dropout
def _dropout_inputs(shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    """(sequence, batch, features) of samples beyond 32 bits."""
    samples = torch.arange(shape[1]) * 7 + 2**33 + 5
    return {"x": normal(shape, generator), "residual": normal(shape, generator), "samples": samples}


def _dropout_add(inputs: Inputs, backend: str) -> Tensor:
    from gridtron.core.kernels.dropout_add import dropout_add

    x = inputs["x"]
    place = (1, [3, 0, 0], [x.shape[-1], 0, 1])
    return dropout_add(x, inputs["residual"], 0.3, KEY, inputs["samples"], *place, backend)


def _dropout(inputs: Inputs, backend: str) -> Tensor:
    from gridtron.core.kernels.dropout_add import counted_dropout

    x = inputs["x"]
    return counted_dropout(x, 0.1, KEY, inputs["samples"], 1, [0, 0, 4], [2 * x.shape[-1], 0, 1], backend)


# ---------------------------------------------------------------- the optimizer
def _adamw_inputs(shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    return {
        "weight": normal(shape, generator),
        "bias": normal(shape[-1:], generator),
        "gradient": normal(shape, generator),
    }


def _adamw(inputs: Inputs, backend: str) -> Tensor:
    """Two steps on wide weights; the narrow copies of them, or the wide where the model is wide."""
    from gridtron.core.kernels.adamw import TritonAdamW
    from gridtron.core.precision import wide_dtype

    narrow = [inputs["weight"].clone(), inputs["bias"].clone()]
    wide = wide_dtype(narrow[0].dtype)
    mains = [nn.Parameter(one.to(wide, copy=True)) for one in narrow]
    gradients = [inputs["gradient"].to(wide), inputs["gradient"].flatten()[: len(narrow[1])].to(wide).clone()]
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-6}
    groups = [{"params": mains, "weight_decay": 0.1}]
    copies = dict(zip(mains, narrow, strict=True)) if wide != narrow[0].dtype else {}
    optimizer: torch.optim.Optimizer = (
        TritonAdamW(groups, **options, copies=copies) if backend == "triton" else torch.optim.AdamW(groups, **options)
    )
    for _ in range(2):
        for main, gradient in zip(mains, gradients, strict=True):
            main.grad = gradient
        optimizer.step()
    results = [copies.get(main, main) for main in mains]
    if backend != "triton":
        results = [main.to(narrow[0].dtype) for main in mains]
    return torch.cat([one.detach().flatten() for one in results])


KEY = -(2**62) - 12345
HIDDEN = ((12, 3, 16), (5, 2, 7), (1, 1, 1), (3, 2, 400), (0, 2, 4))
LOGITS = ((37, 101), (5, 300), (1, 1), (2, 7), (0, 7))
ROWS = ((37, 101), (3, 5, 16), (1, 7), (4, 1), (0, 8), (2, 0, 3))
# The gradient of a lone number is zero: what comes out is noise over the root of eps.
LAYER_NORM = tuple(shape for shape in ROWS if shape[-1] > 1)
HEADS = ((7, 2, 3, 16), (5, 1, 2, 10), (1, 1, 1, 2), (0, 2, 2, 4))
SCORES = ((2, 3, 7, 7), (1, 2, 5, 9), (1, 1, 9, 5), (2, 1, 1, 1), (0, 2, 4, 4))

CALLS: Mapping[str, Call] = {
    "rms_norm": Call("rms_norm", _norm_inputs, _rms_norm, ("x", "weight"), ROWS, (8192, 4096)),
    "layer_norm": Call("layer_norm", _norm_inputs, _layer_norm, ("x", "weight", "bias"), LAYER_NORM, (8192, 4096)),
    "rope": Call("rope", _rope_inputs, _rope, ("x",), HEADS, (2048, 2, 32, 128)),
    "swiglu": Call("swiglu", _swiglu_inputs, _swiglu, ("gate", "up"), (*ROWS, (5,)), (4096, 14336)),
    "swiglu apart": Call("swiglu", _apart_inputs, _swiglu, ("gate", "up"), ((3, 1031),), (4096, 14336)),
    "bias_gelu": Call("bias_gelu", _norm_inputs, _bias_gelu("none"), ("x", "bias"), ROWS, (4096, 16384)),
    "bias_gelu tanh": Call("bias_gelu", _norm_inputs, _bias_gelu("tanh"), ("x", "bias"), ((37, 101),), (4096, 16384)),
    "gelu": Call("bias_gelu", _norm_inputs, _bias_gelu("none", bias=False), ("x",), ((37, 101),), (4096, 16384)),
    "softmax": Call("scaled_masked_softmax", _scores, _softmax(True, False), ("scores",), SCORES, (1, 8, 1024, 4096)),
    "softmax masked": Call(
        "scaled_masked_softmax", _scores, _softmax(False, True), ("scores",), SCORES, (1, 8, 1024, 4096)
    ),
    "softmax both": Call(
        "scaled_masked_softmax", _scores, _softmax(True, True), ("scores",), SCORES, (1, 8, 1024, 4096)
    ),
    "dropout_add": Call("dropout_add", _dropout_inputs, _dropout_add, ("x", "residual"), HIDDEN, (2048, 2, 4096)),
    "dropout": Call("dropout_add", _dropout_inputs, _dropout, ("x",), HIDDEN, (2048, 2, 4096)),
    "adamw": Call("adamw", _adamw_inputs, _adamw, (), ((37, 101), (1, 1)), (4096, 4096)),
    "loss": Call("cross_entropy", _loss_inputs, _loss(False), ("logits",), LOGITS, (1024, 128256)),
    "loss in place": Call("cross_entropy", _loss_inputs, _loss(True), ("logits",), LOGITS[:2], (1024, 128256)),
    "linear loss": Call(
        "linear_cross_entropy", _linear_loss_inputs, _linear_loss, ("x", "weight"), LOGITS, (1024, 128256)
    ),
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
    """The same numbers through torch in float64: that inputs are rounded does not count as an error."""
    exact = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    return results(call, exact, "torch")


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Relative Euclidean norm of each difference; where the truth is zero but for noise, against the largest."""
    assert found.keys() == expected.keys()
    least = 1e-3 * max(float(theirs.double().norm()) for theirs in expected.values())
    for name, theirs in expected.items():
        ours = found[name].double()
        assert ours.shape == theirs.shape, name
        error = float((ours - theirs.double()).norm())
        bound = tolerance * max(float(theirs.double().norm()), least)
        assert error <= bound, f"{name}: error {error:.2e} over {bound:.2e}"
