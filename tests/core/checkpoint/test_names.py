"""A checkpoint with other names than the run: both lists on every rank, an error unless it was asked for."""

from pathlib import Path

import pytest
import torch
from parity import FAMILIES
from ranks import run_ranks

from gridtron.core.checkpoint.layout import CheckpointError, step_path
from gridtron.core.checkpoint.load import load, load_part
from gridtron.core.checkpoint.save import save
from gridtron.core.grid import Grid
from gridtron.core.optim.config import OptimizerConfig
from gridtron.models import GPT
from gridtron.parallel import full_state_dict, load_full_state_dict
from gridtron.parallel.engine import TrainingEngine

NAME = "blocks.0.mlp.up.weight"
OLD, NEW = "blocks.0.mlp.old.weight", NAME
LISTED = ["parameters/{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq", "optimizer/{}/step"]


def engine_of(grid, seed):
    return TrainingEngine(GPT(FAMILIES["llama"], grid, seed=seed), grid, OptimizerConfig("adamw", lr=1e-2))


def save_renamed(folder, sizes):
    """As an older version of the model would have: one parameter, and its optimizer's states, under another name."""
    with Grid.create(**sizes) as grid:
        state = engine_of(grid, 7).state_dict()
        for name, view in state.items():
            if name.endswith(("exp_avg", "exp_avg_sq")):
                view.local.fill_(len(name))
        renamed = {name.replace(NEW, OLD): view for name, view in state.items()}
        save(step_path(Path(folder), 1), renamed, {}, grid)


def load_renamed(folder, sizes):
    """What each rank is told by default, and then without strictness; and that what fits is there."""
    with Grid.create(**sizes) as grid:
        engine = engine_of(grid, 8)
        path = step_path(Path(folder), 1)
        with pytest.raises(CheckpointError) as refused:
            load(path, engine.state_dict(), grid)
        before = full_state_dict(engine.model, grid)
        state = engine.state_dict()
        loaded = load_part(path, state, grid, strict=False)
        engine.load_state_dict(state)
        after, saved = full_state_dict(engine.model, grid), full_state_dict(engine_of(grid, 7).model, grid)
        for name, tensor in after.items():
            assert torch.equal(tensor, before[name] if name == NEW else saved[name]), name
        for name, view in engine.state_dict().items():
            if name.endswith(("exp_avg", "exp_avg_sq")):
                value = 0 if NEW in name else len(name)
                assert torch.equal(view.local, torch.full_like(view.local, value)), name
        return str(refused.value), loaded.missing, loaded.unexpected, loaded.left_out


@pytest.mark.case(30)
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}, {"data": 1}])
def test_renamed_parameter_is_told_on_all_ranks_and_loaded_around_on_demand(sizes, tmp_path):
    world = max(sizes.values())
    run_ranks(save_renamed, world, str(tmp_path), sizes)
    results = run_ranks(load_renamed, world, str(tmp_path), sizes)
    assert all(result == results[0] for result in results)
    message, missing, unexpected, told = results[0]
    assert set(missing) == {pattern.format(NEW) for pattern in LISTED}
    assert set(unexpected) == {pattern.format(OLD) for pattern in LISTED}
    assert all(name in message for name in (*missing, *unexpected))
    assert len(message.splitlines()) == 3 and len(told) == 2


def load_whole_state(sizes):
    with Grid.create(**sizes) as grid:
        saved = full_state_dict(GPT(FAMILIES["llama"], grid, seed=7), grid)
        model = GPT(FAMILIES["llama"], grid, seed=8)
        before = full_state_dict(model, grid)
        state = {name.replace(NEW, OLD): tensor for name, tensor in saved.items()}
        with pytest.raises(ValueError) as refused:
            load_full_state_dict(model, state, grid)
        lists = load_full_state_dict(model, state, grid, strict=False)
        after = full_state_dict(model, grid)
        assert all(torch.equal(after[name], before[name] if name == NEW else saved[name]) for name in saved)
        assert load_full_state_dict(model, saved, grid) == ([], [])
        with pytest.raises(ValueError, match="has shape"):
            load_full_state_dict(model, saved | {NEW: torch.zeros(1)}, grid, strict=False)
        return lists, str(refused.value)


@pytest.mark.case(30)
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}])
def test_whole_states_of_other_names(sizes):
    first, second = run_ranks(load_whole_state, 2, sizes)
    assert first == second
    assert first[0] == ([NEW], [OLD])
    assert f"missing: {NEW}" in first[1] and f"unexpected: {OLD}" in first[1]
