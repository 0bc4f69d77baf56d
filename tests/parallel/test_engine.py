"""The engine: non-finite gradients, number formats, states by name."""

import warnings
from dataclasses import replace

import pytest
import torch
from parity import FAMILIES, Case, global_batch, split
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from gridtron.core import Grid
from gridtron.core.optim.config import OptimizerConfig
from gridtron.models import GPT
from gridtron.parallel import full_state_dict
from gridtron.parallel.engine import TrainingEngine

ADAMW = OptimizerConfig("adamw", lr=1e-3, grad_clip=1.0)


def check_non_finite(sizes, bad_rank):
    with Grid.create(**sizes) as grid:
        engine = TrainingEngine(GPT(FAMILIES["llama"], grid, seed=0), grid, ADAMW)
        outcomes = []
        for step in range(3):
            own = split(global_batch(Case(), step), grid.data.size)[grid.data.rank]
            engine.forward_backward(split(own, 2))
            if step == 1 and grid.rank == bad_rank:
                gradient = next(g for _, g in engine._gradients() if g.piece.sharding.dim == 0)
                gradient.gradient.view(-1)[3] = float("inf")
            before = full_state_dict(engine.model)
            outcomes.append(engine.step(1e-3))
            after = full_state_dict(engine.model)
            changed = any(not torch.equal(before[name], after[name]) for name in before)
            assert changed == outcomes[-1].applied
        return [outcome.applied for outcome in outcomes]


@pytest.mark.parametrize(("sizes", "bad_rank"), [({"tensor": 2}, 1), ({"tensor": 2}, 0), ({"tensor": 3}, 2)])
def test_all_ranks_see_a_non_finite_gradient(sizes, bad_rank):
    assert run_ranks(check_non_finite, sizes["tensor"], sizes, bad_rank) == [[True, False, True]] * sizes["tensor"]


def check_non_finite_on_one_data_rank():
    with Grid.create(data=-1) as grid:
        model = GPT(FAMILIES["llama"], grid, seed=0)
        engine = TrainingEngine(model, grid, ADAMW)
        own = split(global_batch(Case(), 0), grid.data.size)[grid.data.rank]
        if grid.rank == 1:
            model.final_norm.register_forward_hook(lambda *_: torch.full_like(_[2], float("nan"), requires_grad=True))
        engine.forward_backward([own])
        return engine.step(1e-3).applied


def test_a_nan_on_one_data_rank_is_seen_by_all():
    assert run_ranks(check_non_finite_on_one_data_rank, 2) == [False, False]


class NoFloat32(TorchDispatchMode):
    """Fails on any operation that makes or takes a float32 tensor."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                assert value.dtype == torch.float64, f"{function} sees {value.dtype}"
        return out


def check_nothing_below_float64(family, sequence_parallel):
    with Grid.create(tensor=2, data=-1) as grid:
        config = replace(FAMILIES[family], dropout=0.1, attention_dropout=0.1)
        model = GPT(config, grid, seed=0, sequence_parallel=sequence_parallel, dtype=torch.float64)
        engine = TrainingEngine(model, grid, ADAMW)
        batches = split(split(global_batch(Case(), 0), grid.data.size)[grid.data.rank], 2)
        batches = [replace(batch, loss_weights=batch.loss_weights.double()) for batch in batches]
        with NoFloat32():
            engine.forward_backward(batches)
            engine.step(1e-3)
            engine.evaluate(batches)


@pytest.mark.parametrize(("family", "sequence_parallel"), [("llama", True), ("gpt2", False)])
def test_in_float64_nothing_is_below(family, sequence_parallel):
    run_ranks(check_nothing_below_float64, 4, family, sequence_parallel)


def check_bfloat16(sizes):
    with Grid.create(**sizes) as grid:
        engine = TrainingEngine(GPT(FAMILIES["llama"], grid, seed=0, dtype=torch.bfloat16), grid, ADAMW)
        losses = []
        for step in range(8):
            own = split(global_batch(replace(Case(), masks="all"), step), grid.data.size)[grid.data.rank]
            losses.append(engine.forward_backward(split(own, 2)).loss)
            gradients = full_state_dict(engine.model, of="gradients")
            assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
            engine.step(1e-4)
        states = engine.optimizer.states()
        assert all(state["main"].dtype == torch.float32 for state in states.values())
        for item in engine.parameters:
            assert torch.equal(item.parameter, states[item.name]["main"].bfloat16())
        return losses


def test_bfloat16_has_wide_main_weights_and_gradients():
    (expected,) = run_ranks(check_bfloat16, 1, {})
    for losses in run_ranks(check_bfloat16, 4, {"tensor": 2, "data": 2}):
        assert losses == pytest.approx(expected, rel=0.02)


def test_small_updates_are_not_lost_in_bfloat16():
    """lr 1e-5 on weights of 1: a bfloat16 weight would never move."""
    grid = Grid.create()
    model = torch.nn.Embedding.from_pretrained(torch.ones(4, 4, dtype=torch.bfloat16), freeze=False)
    model.forward_plain = model.forward
    model.forward = lambda tokens, targets: model.forward_plain(tokens).sum(-1)
    engine = TrainingEngine(model, grid, OptimizerConfig("sgd", lr=1e-5, weight_decay=0, grad_clip=0))
    whole = global_batch(replace(Case(), masks="all", sequence_length=3), 0)
    batch = replace(whole, tokens=torch.zeros_like(whole.tokens))
    for _ in range(1000):
        engine.forward_backward([batch])
        engine.step(1e-4)
    assert float(model.weight[0, 0]) < 0.999


@pytest.mark.case(3)
def test_one_warning_for_steps_without_tokens():
    engine = TrainingEngine(GPT(FAMILIES["llama"], seed=0), Grid.create(), ADAMW)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            assert engine.forward_backward([global_batch(replace(Case(), masks="none"), step)]).loss == 0.0
            assert engine.step(1e-3).applied
    assert [str(w.message) for w in caught if "no token" in str(w.message)] == [
        "a step has no token that counts in the loss: its loss and gradients are zero"
    ]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_states_go_by_the_names_of_parameters(name):
    grid = Grid.create()
    engine = TrainingEngine(GPT(FAMILIES["gpt2"], seed=0), grid, OptimizerConfig(name, momentum=0.9))
    names = set(full_state_dict(engine.model))
    kinds = {"adamw": {"exp_avg", "exp_avg_sq", "step"}, "sgd": {"momentum_buffer"}}[name]
    expected = {f"parameters/{n}" for n in names} | {f"optimizer/{n}/{kind}" for n in names for kind in kinds}
    assert set(engine.state_dict()) == expected


def test_biases_and_norms_do_not_decay():
    engine = TrainingEngine(GPT(FAMILIES["gpt2"], seed=0), Grid.create(), OptimizerConfig("sgd", weight_decay=0.5))
    decayed, kept = engine.optimizer.inner.param_groups
    assert decayed["weight_decay"] == 0.5 and kept["weight_decay"] == 0.0
    assert all(p.ndim == 2 for p in decayed["params"]) and all(p.ndim == 1 for p in kept["params"])
