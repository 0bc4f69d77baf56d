"""AdamW by NVIDIA's apex, with the states of torch's.

apex updates all tensors of a group in one launch, as torch's fused AdamW does; it is used where it was built from
NVIDIA's source (``core.capabilities.find_apex() == "nvidia"``) and main weights are float32 on CUDA. The package of its
name on PyPI is another project's.

Written to the interface of apex's ``FusedAdam`` and tested on a stand-in of that interface; it has not been run on apex
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gridtron.core.kernels.adamw import fresh_state


class ApexAdamW(torch.optim.Optimizer):
    """``apex.optimizers.FusedAdam`` as decoupled AdamW; its states are ``exp_avg``, ``exp_avg_sq`` and ``step`` of each
    parameter, as torch's, so that a checkpoint is the same with apex and without.

    apex counts steps by group, in the group; here each parameter has its own count, on the CPU, where reading it waits
    for nothing.

    Args:
        groups: parameters in float32 on CUDA, each group with its ``weight_decay``.
        lr, betas, eps: AdamW's.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        from apex.optimizers import FusedAdam

        self.inner: torch.optim.Optimizer = FusedAdam(
            groups, lr=lr, bias_correction=True, betas=betas, eps=eps, adam_w_mode=True
        )
        super().__init__(self.inner.param_groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        # One set of groups and states: what is written here is what apex reads.
        self.inner.param_groups = self.param_groups
        self.inner.state = self.state
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = fresh_state(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient stay as they are, and their counts too."""
        assert closure is None
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        by_count: dict[int, list[Tensor]] = {}
        for parameter in gradients:
            by_count.setdefault(int(self.state[parameter]["step"]), []).append(parameter)
        for count, parameters in sorted(by_count.items()):
            chosen = set(parameters)
            for parameter, gradient in gradients.items():
                # The launch over a list ends with its last tensor: apex forgets the ones before an empty last one.
                parameter.grad = gradient if parameter in chosen and parameter.numel() else None
            for group in self.param_groups:
                group["step"] = count
            self.inner.step()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
            self.state[parameter]["step"] += 1
