"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2) over all tensors of a group in one launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gridtron.core.kernels.backend import launcher

if TYPE_CHECKING:
    from gridtron.core.kernels.triton_kernels.adamw import Row, Table


class TritonAdamW(torch.optim.Optimizer):
    """torch's AdamW, with its states, in one pass over main weights, gradients, states and the model's narrow weights.

    One launch a group and step (one for each count of steps, where parameters went without gradients). A table of
    addresses is made once; where a tensor has moved it is written anew. Bias corrections are computed in float64 on the
    host.

    Args:
        groups: float32 or float64 parameters on one device, each group with its ``weight_decay``; contiguous.
        lr, betas, eps: AdamW's.
        copies: parameter -> the model's own weight of another dtype, which is written in the same pass.
    """

    elementwise = True
    """Each number is updated by its own gradient alone: right for parts of tensors too."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        copies: Mapping[Tensor, Tensor] | None = None,
    ):
        constants = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__([dict(group) for group in groups], constants)
        self.copies = dict(copies or {})
        self._tables: dict[tuple[int, int], Table] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = fresh_state(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient stay as they are, and their counts too."""
        assert closure is None
        for number, group in enumerate(self.param_groups):
            launches: dict[tuple[int, Any], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state, copy = self.state[parameter], self.copies.get(parameter)
                    state["step"] += 1
                    kind = int(state["step"]), None if copy is None else copy.dtype
                    launches.setdefault(kind, []).append(parameter)
            for place, ((count, _), parameters) in enumerate(launches.items()):
                self._update(group, (number, place), count, [one for one in parameters if one.numel()])

    def _update(self, group: Mapping[str, Any], place: tuple[int, int], count: int, parameters: list[Tensor]) -> None:
        if not parameters:
            return
        from gridtron.core.kernels.triton_kernels.adamw import Table

        rows: list[Row] = []
        for one in parameters:
            assert one.grad is not None
            state = self.state[one]
            rows.append((one, one.grad, state["exp_avg"], state["exp_avg_sq"], self.copies.get(one)))
        table = self._tables.get(place)
        if table is None or not table.fits(rows):
            table = self._tables[place] = Table(rows)
        table.find(rows)
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        run = launcher("adamw", "update")
        decay, root = 1 - lr * group["weight_decay"], math.sqrt(1 - beta2**count)
        run(table.addresses, table, decay, lr / (1 - beta1**count), root, group["eps"], beta1, beta2)
        # Autograd does not see the writes of a kernel.
        copies = [self.copies[one] for one in parameters if one in self.copies]
        torch.autograd.graph.increment_version([*parameters, *copies])


def fresh_state(parameter: Tensor, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """torch's states of a parameter that has not been updated yet. The count is of its dtype: nothing of a float64 run
    is below float64. On the CPU reading it waits for nothing; torch's fused update wants it beside the parameter."""
    return {
        "step": torch.zeros((), dtype=parameter.dtype, device=device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }
