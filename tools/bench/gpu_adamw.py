"""One update of AdamW over a whole model: float32 main weights, and the model's narrow ones written from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gridtron.core.capabilities import Capabilities
from gridtron.core.kernels.config import backend_fault
from gridtron.tools.bench.plain import Shape

_CONSTANTS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}


def shapes_of(shape: Shape) -> list[tuple[int, ...]]:
    """Of the parameters of the yardstick's model."""
    from gridtron.tools.bench.plain import PlainGPT

    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in PlainGPT(shape).parameters()]


def updates(
    shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype, found: Capabilities
) -> dict[str, Callable[[], object]]:
    """Name -> one update; ours first. Each has weights and states of its own, the gradients are shared."""
    gradients = [torch.randn(shape, device=device) for shape in shapes]

    def made(build: Callable[[list[dict[str, Any]], dict[Tensor, Tensor]], torch.optim.Optimizer]) -> Any:
        mains = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for main, gradient in zip(mains, gradients, strict=True):
            main.grad = gradient
        copies: dict[Tensor, Tensor] = {main: main.detach().to(dtype) for main in mains if dtype != main.dtype}
        return build([{"params": mains, "weight_decay": 0.1}], copies), copies

    def triton(groups: list[dict[str, Any]], copies: dict[Tensor, Tensor]) -> torch.optim.Optimizer:
        from gridtron.core.kernels.adamw import TritonAdamW

        return TritonAdamW(groups, **_CONSTANTS, copies=copies)

    def apex(groups: list[dict[str, Any]], copies: dict[Tensor, Tensor]) -> torch.optim.Optimizer:
        from gridtron.core.optim.apex import ApexAdamW

        return ApexAdamW(groups, **_CONSTANTS)

    def fused(groups: list[dict[str, Any]], copies: dict[Tensor, Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **_CONSTANTS, fused=True)

    def then_copy(optimizer: torch.optim.Optimizer, copies: dict[Tensor, Tensor]) -> Callable[[], object]:
        def update() -> None:
            optimizer.step()
            with torch.no_grad():
                for main, copy in copies.items():
                    copy.copy_(main)

        return update

    runs: dict[str, Callable[[], object]] = {}
    if backend_fault("triton", found) is None:
        runs["triton"] = made(triton)[0].step
    if backend_fault("apex", found) is None:
        runs["apex"] = then_copy(*made(apex))
    runs["torch"] = then_copy(*made(fused))
    return runs
