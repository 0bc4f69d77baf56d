"""The same numbers on a CUDA device as on the CPU (`make test-gpu`); the bodies run on the CPU in every test run."""

from dataclasses import replace

import pytest
import torch
from parity import FAMILIES, Case, global_batch, split, worst_error

from gridtron.core import Grid
from gridtron.core.optim.config import OptimizerConfig
from gridtron.core.precision import LossScaler
from gridtron.core.random import counted_dropout
from gridtron.models import GPT
from gridtron.parallel import full_state_dict
from gridtron.parallel.engine import TrainingEngine
from gridtron.parallel.recompute import RecomputeConfig

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def train(device, dtype, family="llama", recompute="none", steps=3, optimizer="adamw"):
    config = replace(FAMILIES[family], dropout=0.1, attention_dropout=0.1)
    with Grid.create(device=device) as grid:
        assert grid.device.type == device
        model = GPT(config, grid, seed=1, dtype=dtype, device=grid.device, recompute=RecomputeConfig(recompute))
        initial = full_state_dict(model)
        scaler = LossScaler(scale=1024.0) if dtype == torch.float16 else None
        engine = TrainingEngine(model, grid, OptimizerConfig(optimizer, lr=1e-3, momentum=0.9), loss_scaler=scaler)
        losses = []
        for step in range(steps):
            losses.append(engine.forward_backward(split(global_batch(Case(), step), 2)).loss)
            engine.step(1e-3)
        return initial, losses, full_state_dict(model), engine.evaluate([global_batch(Case(), 9)]).loss


@pytest.mark.sample(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_float64_training_equals_the_cpus(device, family, recompute):
    initial, losses, parameters, evaluation = train(device, torch.float64, family, recompute)
    expected = train("cpu", torch.float64, family)
    assert all(torch.equal(initial[name], expected[0][name]) for name in initial), "weights are drawn on the CPU"
    assert losses == pytest.approx(expected[1], rel=1e-9) and evaluation == pytest.approx(expected[3], rel=1e-9)
    assert worst_error(parameters, expected[2])[0] < 1e-8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_in_sixteen_bits(device, dtype, optimizer):
    _, losses, parameters, _ = train(device, dtype, optimizer=optimizer)
    assert losses == pytest.approx(train("cpu", torch.float64, optimizer=optimizer)[1], rel=0.03)
    assert all(torch.isfinite(tensor).all() for tensor in parameters.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden", [16, 7])
def test_masks_are_the_cpus_to_the_bit(device, hidden):
    x = torch.ones(12, 6, hidden)
    samples = torch.arange(6) * 3
    arguments = (0.3, 12345, 1, [4, 0, 0], [hidden, 0, 1])
    expected = counted_dropout(x, arguments[0], arguments[1], samples, *arguments[2:])
    drawn = counted_dropout(x.to(device), arguments[0], arguments[1], samples.to(device), *arguments[2:])
    assert torch.equal(drawn.cpu(), expected)


@pytest.mark.gpu
def test_this_machine_has_a_device():
    """`make test-gpu` on a machine without one fails here instead of passing without a word."""
    assert torch.cuda.is_available()
