"""Whole states and checkpoints of a model whose stages lie on several ranks."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import FAMILIES
from ranks import run_ranks

from gridtron.core import Grid
from gridtron.core.checkpoint.find import find_checkpoint
from gridtron.core.checkpoint.layout import step_path
from gridtron.core.checkpoint.load import load
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.core.checkpoint.save import save
from gridtron.core.optim.config import OptimizerConfig
from gridtron.models import GPT
from gridtron.parallel import DataParallel, full_state_dict, load_full_state_dict
from gridtron.parallel.engine import TrainingEngine
from gridtron.parallel.parameters import named_parameters

CONFIGS = {name: replace(config, num_layers=5) for name, config in FAMILIES.items()}
V = {"placement": [0, 1, 1, 0]}
LOOP = {"num_stages": 4}
GRIDS = [
    ({"pipeline": 2}, {}),
    ({"pipeline": 2}, V),
    ({"pipeline": 3}, {}),
    ({"pipeline": 2, "tensor": 2}, LOOP),
    ({"pipeline": 2, "data": 2}, {"layers_per_stage": [1, 4]}),
    ({"pipeline": 3}, {"placement": [2, 0, 1]}),
]


def world(sizes):
    return math.prod(sizes.values())


def whole_of(family):
    return full_state_dict(GPT(CONFIGS[family], seed=7, dtype=torch.float64))


def compare_with_one_process(sizes, arguments):
    """Parameters, and gradients 2 x the parameter, that of a shared embedding in two parts; then loading."""
    with Grid.create(**sizes) as grid:
        for family, wrapped in itertools.product(("llama", "gpt2"), (False, True)):
            whole = whole_of(family)
            model = GPT(CONFIGS[family], grid, seed=7, dtype=torch.float64, **arguments)
            outer = DataParallel(model, grid.data) if wrapped else model
            for item in named_parameters(model):
                part = (1.5 if 0 in model.stages else 0.5) if item.copies is not None else 2.0
                share = part / (grid.data.size if wrapped else 1)
                # Autograd's own way to the gradient: what a wrapper has hooked is told.
                (item.parameter * item.parameter.detach() * share).sum().backward()
            gradients = full_state_dict(outer, grid, of="gradients")
            state = full_state_dict(outer, grid)
            assert list(state) == list(gradients) == list(whole)
            assert all(torch.equal(state[name], tensor) for name, tensor in whole.items())
            for name, tensor in whole.items():
                torch.testing.assert_close(gradients[name], 2 * tensor, rtol=1e-15, atol=0)
            other = GPT(CONFIGS[family], grid, seed=8, dtype=torch.float64, **arguments)
            load_full_state_dict(other, state, grid)
            again = full_state_dict(other, grid)
            assert all(torch.equal(state[name], again[name]) for name in state)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("sizes", "arguments"), GRIDS)
def test_every_rank_sees_the_state_of_one_process(sizes, arguments):
    run_ranks(compare_with_one_process, world(sizes), sizes, arguments)


def one_sided_gradient():
    """Where only the last stage's rank has a gradient, the first's counts as zero; where none has, there is none."""
    with Grid.create(pipeline=2) as grid:
        model = GPT(CONFIGS["gpt2"], grid, seed=7)
        if grid.rank == 1:
            model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
        found = full_state_dict(model, grid, of="gradients")
        return {name: float(tensor.sum()) for name, tensor in found.items()}


def test_a_gradient_on_one_side():
    assert run_ranks(one_sided_gradient, 2) == [{"embedding.weight": 101.0 * 16}] * 2


def foreign_state():
    with Grid.create(pipeline=2) as grid:
        model = GPT(CONFIGS["llama"], grid, seed=7)
        state = full_state_dict(model, grid)
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        del state["final_norm.weight"]
        state["stranger"] = torch.zeros(1)
        state["blocks.0.mlp.up.weight"] = torch.zeros(2, 2)
        try:
            load_full_state_dict(model, state, grid)
        except ValueError as fault:
            same = all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
            return str(fault), same
        return None


def test_a_foreign_state_is_refused_on_all_ranks_alike():
    (first, kept), (second, also_kept) = run_ranks(foreign_state, 2)
    assert first == second and kept and also_kept
    assert "missing: final_norm.weight" in first and "unexpected: stranger" in first
    assert "blocks.0.mlp.up.weight has shape (2, 2)" in first and first.count("\n") == 3


# ---------------------------------------------------------------- checkpoints
ADAMW = OptimizerConfig("adamw", lr=1e-2)


def engine_of(family, grid, arguments, seed):
    return TrainingEngine(GPT(CONFIGS[family], grid, seed=seed, dtype=torch.float64, **arguments), grid, ADAMW)


def save_both(folder, sizes, arguments):
    with Grid.create(**sizes) as grid:
        for family in ("llama", "gpt2"):
            views = engine_of(family, grid, arguments, 7).state_dict()
            for name, view in views.items():
                if name.startswith("optimizer/") and view.local.ndim:
                    # Moments that tell names and rows apart.
                    view.local.copy_(views["parameters/" + name.split("/")[1]].local)
            save(step_path(Path(folder, family), 1), views, {"step": 1}, grid)


def load_both(folder, sizes, arguments):
    with Grid.create(**sizes) as grid:
        for family in ("llama", "gpt2"):
            engine = engine_of(family, grid, arguments, 8)
            views = engine.state_dict()
            load(find_checkpoint(Path(folder, family)), views, grid)
            engine.load_state_dict(views)
            for name, view in engine.state_dict().items():
                if name.startswith("optimizer/") and view.local.ndim:
                    assert torch.equal(view.local, views["parameters/" + name.split("/")[1]].local), name
            whole, state = whole_of(family), full_state_dict(engine.model, grid)
            assert list(state) == list(whole) and all(torch.equal(state[name], whole[name]) for name in whole)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (({"pipeline": 2}, {}), ({"data": 1}, {})),
        (({"data": 1}, {}), ({"pipeline": 2}, V)),
        (({"pipeline": 2}, V), ({"pipeline": 3}, {})),
        (({"pipeline": 2, "tensor": 2}, LOOP), ({"pipeline": 2, "data": 2}, {})),
        (({"pipeline": 3}, {"placement": [2, 0, 1]}), ({"tensor": 2}, {})),
    ],
)
def test_saved_on_one_grid_and_loaded_on_another(saved, loaded, tmp_path):
    run_ranks(save_both, world(saved[0]), str(tmp_path), *saved)
    for family in ("llama", "gpt2"):
        manifest = Manifest.read(find_checkpoint(tmp_path / family))
        entries = {name: entry for name, entry in manifest.tensors.items() if name.startswith("parameters/")}
        written = sum(piece.numel for entry in entries.values() for piece in entry.pieces)
        assert written == sum(tensor.numel() for tensor in whole_of(family).values()), "each row is written once"
    run_ranks(load_both, world(loaded[0]), str(tmp_path), *loaded)
