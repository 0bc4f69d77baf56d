"""Each local operation beside plain torch, its compilation, Liger-Kernel and NVIDIA apex, where these are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gridtron.core.capabilities import Capabilities
from gridtron.core.kernels.config import AVAILABLE, backend_fault
from gridtron.tools.bench import gpu_bytes
from gridtron.tools.bench.gpu_bytes import Passes

Inputs = dict[str, Any]
Run = Callable[[Inputs], "Tensor | tuple[Tensor, ...]"]
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """What is measured: rows of a microbatch, and the widths of a model of eight billion parameters."""

    rows: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    sequence: int = 2048
    vocabulary: int = 128256
    loss_rows: int = 4096
    softmax_heads: int = 16


TINY = Sizes(rows=8, hidden=16, ffn=24, heads=2, sequence=4, vocabulary=33, loss_rows=6, softmax_heads=2)


@dataclass(frozen=True)
class Operation:
    """One operation and who runs it.

    Args:
        name: as the options call it.
        size: for the table.
        inputs: those with a gradient are leaves.
        ours: (inputs, backend) -> result.
        plain: the same as one writes it in torch.
        liger: the same by Liger-Kernel; None where it has none.
        bytes: of each pass; None where products take the time.
        flops: of each pass, where they do.
        random: results of different makers are not comparable.
    """

    name: str
    size: str
    inputs: Callable[[], Inputs]
    ours: Callable[[Inputs, str], Tensor | tuple[Tensor, ...]]
    plain: Run
    liger: Run | None = None
    bytes: Passes | None = None
    flops: Passes | None = None
    random: bool = False


def operations(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Operation]:
    """All but AdamW."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, leaf: bool = True) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype).requires_grad_(leaf)

    width = dtype.itemsize
    return [
        *_norms(sizes, draw, width),
        _rope(sizes, draw, width),
        *_activations(sizes, draw, width),
        _softmax(sizes, draw, width),
        _dropout_add(sizes, draw, width, device),
        *_losses(sizes, draw, width, generator),
    ]


Draw = Callable[..., Tensor]


def _norms(sizes: Sizes, draw: Draw, width: int) -> list[Operation]:
    from gridtron.core.kernels.layer_norm import layer_norm
    from gridtron.core.kernels.rms_norm import rms_norm

    rows, hidden = sizes.rows, sizes.hidden
    size = f"{rows} x {hidden}"

    def inputs() -> Inputs:
        return {"x": draw(rows, hidden), "weight": draw(hidden), "bias": draw(hidden)}

    def liger_rms(given: Inputs) -> Tensor:
        from liger_kernel.transformers.functional import liger_rms_norm

        return liger_rms_norm(given["x"], given["weight"], EPS, in_place=False)

    def liger_layer(given: Inputs) -> Tensor:
        from liger_kernel.transformers.functional import liger_layer_norm

        return liger_layer_norm(given["x"], given["weight"], given["bias"], EPS)

    return [
        Operation(
            "rms_norm",
            size,
            lambda: {name: value for name, value in inputs().items() if name != "bias"},
            lambda given, backend: rms_norm(given["x"], given["weight"], EPS, backend),
            lambda given: F.rms_norm(given["x"], given["weight"].shape, given["weight"], EPS),
            liger_rms,
            gpu_bytes.rms_norm(rows, hidden, width),
        ),
        Operation(
            "layer_norm",
            size,
            inputs,
            lambda given, backend: layer_norm(given["x"], given["weight"], given["bias"], EPS, backend),
            lambda given: F.layer_norm(given["x"], given["weight"].shape, given["weight"], given["bias"], EPS),
            liger_layer,
            gpu_bytes.layer_norm(rows, hidden, width),
        ),
    ]


def _rope(sizes: Sizes, draw: Draw, width: int) -> Operation:
    from gridtron.core.kernels.rope import rope

    batch, heads, length = max(1, sizes.rows // sizes.sequence), sizes.heads, sizes.sequence
    head = sizes.hidden // heads

    def inputs() -> Inputs:
        angles = draw(length, head // 2, leaf=False)
        made = {name: draw(batch, length, heads, head) for name in ("q", "k")}
        return {**made, "cos": angles.cos(), "sin": angles.sin()}

    def seen(given: Inputs) -> tuple[Tensor, Tensor]:
        """(batch, heads, sequence, width), as a projection gives it."""
        return given["q"].transpose(1, 2), given["k"].transpose(1, 2)

    def tables(given: Inputs) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat((given[name], given[name]), -1) for name in ("cos", "sin"))  # type: ignore[return-value]

    def ours(given: Inputs, backend: str) -> tuple[Tensor, ...]:
        return tuple(rope(x, given["cos"], given["sin"], backend) for x in seen(given))

    def plain(given: Inputs) -> tuple[Tensor, ...]:
        cos, sin = tables(given)

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        return tuple(turned(x) for x in seen(given))

    def liger(given: Inputs) -> tuple[Tensor, ...]:
        from liger_kernel.transformers.functional import liger_rope

        cos, sin = tables(given)
        return tuple(liger_rope(*seen(given), cos.unsqueeze(0), sin.unsqueeze(0))[:2])

    moved = gpu_bytes.rope(batch, heads, length, head, width)
    return Operation("rope", f"2 x {batch} x {heads} x {length} x {head}", inputs, ours, plain, liger, moved)


def _activations(sizes: Sizes, draw: Draw, width: int) -> list[Operation]:
    from gridtron.core.kernels.bias_gelu import bias_gelu
    from gridtron.core.kernels.swiglu import swiglu

    rows, ffn = sizes.rows // 2, sizes.ffn

    def liger(given: Inputs) -> Tensor:
        from liger_kernel.transformers.functional import liger_swiglu

        return liger_swiglu(given["gate"], given["up"])

    return [
        Operation(
            "swiglu",
            f"{rows} x {ffn}",
            lambda: {"gate": draw(rows, ffn), "up": draw(rows, ffn)},
            lambda given, backend: swiglu(given["gate"], given["up"], backend),
            lambda given: F.silu(given["gate"]) * given["up"],
            liger,
            gpu_bytes.swiglu(rows, ffn, width),
        ),
        Operation(
            "bias_gelu",
            f"{rows} x {ffn}",
            lambda: {"x": draw(rows, ffn), "bias": draw(ffn)},
            lambda given, backend: bias_gelu(given["x"], given["bias"], "tanh", backend),
            lambda given: F.gelu(given["x"] + given["bias"], approximate="tanh"),
            bytes=gpu_bytes.bias_gelu(rows, ffn, width),
        ),
    ]


def _softmax(sizes: Sizes, draw: Draw, width: int) -> Operation:
    from gridtron.core.kernels.scaled_masked_softmax import scaled_masked_softmax

    heads, length = sizes.softmax_heads, sizes.sequence

    def inputs() -> Inputs:
        scores = draw(1, heads, length, length)
        return {"scores": scores, "future": torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)}

    def plain(given: Inputs) -> Tensor:
        scores = given["scores"].float() * 0.125
        return torch.softmax(scores.masked_fill(given["future"], float("-inf")), -1).to(given["scores"].dtype)

    return Operation(
        "scaled_masked_softmax",
        f"1 x {heads} x {length} x {length}, causal",
        inputs,
        lambda given, backend: scaled_masked_softmax(given["scores"], 0.125, True, None, backend),
        plain,
        bytes=gpu_bytes.scaled_masked_softmax(1, heads, length, width),
    )


def _dropout_add(sizes: Sizes, draw: Draw, width: int, device: torch.device) -> Operation:
    from gridtron.core.kernels.dropout_add import dropout_add

    rows, hidden = sizes.rows, sizes.hidden
    batch = max(1, rows // sizes.sequence)
    length = rows // batch
    samples = torch.arange(batch, device=device)
    return Operation(
        "dropout_add",
        f"{rows} x {hidden}",
        lambda: {"x": draw(length, batch, hidden), "residual": draw(length, batch, hidden)},
        lambda given, backend: dropout_add(
            given["x"], given["residual"], 0.1, 77, samples, 1, [0, 0, 0], [hidden, 0, 1], backend
        ),
        lambda given: given["residual"] + F.dropout(given["x"], 0.1),
        bytes=gpu_bytes.dropout_add(length * batch, hidden, width),
        random=True,
    )


def _losses(sizes: Sizes, draw: Draw, width: int, generator: torch.Generator) -> list[Operation]:
    from gridtron.parallel.linear_loss import vocab_parallel_linear_cross_entropy
    from gridtron.parallel.loss import vocab_parallel_cross_entropy

    rows, vocabulary, hidden = sizes.loss_rows, sizes.vocabulary, sizes.hidden

    def target() -> Tensor:
        return torch.randint(0, vocabulary, (rows,), generator=generator, device=generator.device)

    def head(given: Inputs) -> Tensor:
        return F.linear(given["x"], given["weight"])

    def liger(given: Inputs) -> Tensor:
        from liger_kernel.transformers.functional import liger_cross_entropy

        return liger_cross_entropy(given["logits"], given["target"])

    def liger_linear(given: Inputs) -> Tensor:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(given["x"], given["weight"], given["target"])

    def head_inputs() -> Inputs:
        # Logits of about one.
        weight = draw(vocabulary, hidden, leaf=False).mul_(hidden**-0.5).requires_grad_()
        return {"x": draw(rows, hidden), "weight": weight, "target": target()}

    return [
        Operation(
            "cross_entropy",
            f"{rows} x {vocabulary}",
            lambda: {"logits": draw(rows, vocabulary), "target": target()},
            lambda given, backend: vocab_parallel_cross_entropy(
                given["logits"], given["target"], backend=backend
            ).mean(),
            lambda given: F.cross_entropy(given["logits"].float(), given["target"]),
            liger,
            gpu_bytes.cross_entropy(rows, vocabulary, width),
        ),
        Operation(
            "linear_cross_entropy",
            f"{rows} x {hidden} x {vocabulary}",
            head_inputs,
            lambda given, backend: vocab_parallel_linear_cross_entropy(
                given["x"], given["weight"], given["target"], backend=backend
            ).mean(),
            lambda given: F.cross_entropy(head(given).float(), given["target"]),
            liger_linear,
            flops=gpu_bytes.linear_cross_entropy_flops(rows, hidden, vocabulary),
        ),
    ]


def contenders(operation: Operation, found: Capabilities, compiler: Compiler) -> dict[str, Run]:
    """Name -> what runs the operation; ours first."""
    made: dict[str, Run] = {}
    for backend in AVAILABLE[operation.name]:
        if backend != "torch" and backend_fault(backend, found) is None:
            made[backend] = lambda given, backend=backend: operation.ours(given, backend)  # type: ignore[misc]
    made["torch"] = operation.plain
    made["torch.compile"] = compiler(operation.plain)
    if operation.liger is not None and has_liger():
        made["Liger"] = operation.liger
    return made


def has_liger() -> bool:
    """Whether Liger-Kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def with_gradients(run: Run, given: Inputs) -> Callable[[], object]:
    """Forward and backward, under gradients that are there before."""
    leaves = [value for value in given.values() if isinstance(value, Tensor) and value.requires_grad]
    ones = [torch.ones_like(one) for one in results_of(run, given)]

    def both() -> Sequence[Tensor]:
        return torch.autograd.grad(results_of(run, given), leaves, ones)

    return both


def results_of(run: Run, given: Inputs) -> tuple[Tensor, ...]:
    """What a contender returns, as a tuple."""
    found = run(given)
    return found if isinstance(found, tuple) else (found,)


def own_inputs(given: Mapping[str, Any]) -> Inputs:
    """A copy: some contenders write over what they are given."""
    return {
        name: value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
