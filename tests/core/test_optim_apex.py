"""apex's FusedAdam behind torch's states: on a stand-in with its interface, as apex needs a CUDA build of its own."""

import inspect
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from gridtron.core.optim.apex import ApexAdamW
from gridtron.core.optim.config import OptimizerConfig
from gridtron.core.optim.optimizer import Optimizer

CONFIG = OptimizerConfig("adamw", weight_decay=0.1, eps=1e-6)


class FusedAdam(torch.optim.Optimizer):
    """What apex's promises: one count of steps a group, kept in the group, whatever parameters took part."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ):
        assert adam_w_mode and bias_correction and not (amsgrad or capturable or master_weights)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None, **deprecated: Any) -> None:  # type: ignore[override]
        assert closure is None and not deprecated
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            launched = [p for p in group["params"] if p.grad is not None]
            # The real launch is made at the last tensor's last chunk: an empty last tensor makes none.
            assert not launched or launched[-1].numel()
            for p in launched:
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                first, second, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
                first.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                second.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                update = first / (1 - beta1 ** group["step"]) / root + group["weight_decay"] * p
                p.add_(update, alpha=-group["lr"])


@pytest.fixture(autouse=True)
def apex(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)


class OnCuda(nn.Parameter):
    """Says that it lies on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


def parameters(kind: Any = OnCuda) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"w": kind(torch.randn(4, 3)), "b": kind(torch.randn(5)), "empty": kind(torch.empty(0))}


def run(optimizer: Optimizer, steps: range) -> None:
    """``b`` has no gradient at every third step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        gradients = {n: torch.randn(p.shape, generator=generator) for n, p in optimizer.parameters.items()}
        if step % 3 == 1:
            del gradients["b"]
        optimizer.step(0.01 / (step + 1), gradients)


def compare(ours: Optimizer, theirs: Optimizer) -> None:
    for name, parameter in theirs.parameters.items():
        torch.testing.assert_close(ours.parameters[name].detach().as_subclass(torch.Tensor), parameter.detach())
        found, expected = ours.states()[name], theirs.states()[name]
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key].as_subclass(torch.Tensor), tensor, rtol=1e-5, atol=1e-7)


def test_it_updates_as_torchs_with_the_same_states() -> None:
    ours, theirs = Optimizer(parameters(), CONFIG, adamw="apex"), Optimizer(parameters(nn.Parameter), CONFIG)
    assert isinstance(ours.inner, ApexAdamW) and isinstance(theirs.inner, torch.optim.AdamW)
    run(ours, range(7))
    run(theirs, range(7))
    compare(ours, theirs)
    assert float(ours.states()["b"]["step"]) == 5 and float(ours.states()["w"]["step"]) == 7


@pytest.mark.parametrize("apex_first", [True, False])
def test_a_checkpoint_is_the_same_with_apex_and_without(apex_first: bool) -> None:
    kinds = [(OnCuda, "apex"), (nn.Parameter, "torch")]
    first, second = (Optimizer(parameters(kind), CONFIG, adamw=how) for kind, how in kinds[:: 1 if apex_first else -1])
    run(first, range(4))
    states = first.states()
    for name, state in second.states().items():
        second.parameters[name].data.copy_(first.parameters[name].data)
        for key, tensor in state.items():
            tensor.copy_(states[name][key])
    second.take_states()
    run(first, range(4, 8))
    run(second, range(4, 8))
    compare(*((first, second) if apex_first else (second, first)))


def test_muon_leaves_the_rest_to_it() -> None:
    optimizer = Optimizer(parameters(), OptimizerConfig("muon"), adamw="apex")
    assert optimizer.inner is not None and isinstance(getattr(optimizer.inner, "others", None), ApexAdamW)
    run(optimizer, range(2))
    theirs = Optimizer(parameters(nn.Parameter), OptimizerConfig("muon"))
    run(theirs, range(2))
    compare(optimizer, theirs)


@pytest.mark.parametrize("kind", ["cpu", "double", "sgd"])
def test_it_is_used_for_float32_on_cuda_alone(kind: str) -> None:
    made = (
        nn.Parameter(torch.ones(3))
        if kind == "cpu"
        else OnCuda(torch.ones(3).double() if kind == "double" else torch.ones(3))
    )
    optimizer = Optimizer({"w": made}, OptimizerConfig("sgd" if kind == "sgd" else "adamw"), adamw="apex")
    assert type(optimizer.inner).__module__.startswith("torch.optim")


def test_only_arguments_that_every_version_has_are_given() -> None:
    """Of the names after ``set_grad_none`` apex has changed one: they stay at their defaults."""
    seen: dict[str, Any] = {}

    class Recording(FusedAdam):
        def __init__(self, params: Any, **options: Any):
            seen.update(options)
            super().__init__(params, **options)

    sys.modules["apex.optimizers"].FusedAdam = Recording  # type: ignore[attr-defined]
    Optimizer(parameters(), CONFIG, adamw="apex")
    names = list(inspect.signature(FusedAdam).parameters)
    assert set(seen) <= set(names[: names.index("set_grad_none")])
