"""A checkpoint of any ZeRO stage on any grid goes on with any other stage on any other grid."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import assert_same, together, train, whole_state
from parity import FAMILIES, Case, build_engine, pairwise, worst_error
from ranks import run_ranks

from gridtron.core import Grid
from gridtron.core.checkpoint.find import find_checkpoint
from gridtron.core.checkpoint.layout import step_path
from gridtron.core.checkpoint.load import load
from gridtron.core.checkpoint.save import save
from gridtron.core.optim.config import OptimizerConfig

# A key bias has no gradient but rounding, which AdamW divides by eps: a larger one keeps it below the bound.
OPTIMIZERS = {
    "adamw": OptimizerConfig("adamw", lr=1e-3, grad_clip=1.0, weight_decay=0.1, eps=1e-6),
    "muon": OptimizerConfig("muon", lr=1e-3, grad_clip=1.0, weight_decay=0.1, momentum=0.9, eps=1e-6),
}


def save_and_go_on(folder, case, dtype):
    """Two steps, a checkpoint, three more: the state at the checkpoint and at the end."""
    with Grid.create(**case.grid) as grid:
        engine = build_engine(case, grid, dtype)
        train(engine, case, range(2))
        save(step_path(Path(folder), 2), engine.state_dict(), {"step": 2}, grid)
        middle = whole_state(engine)
        train(engine, case, range(2, 5))
        return middle, whole_state(engine)


def load_and_go_on(folder, case, dtype):
    """From other weights: the state that was loaded, and that after three steps."""
    with Grid.create(**case.grid) as grid:
        engine = build_engine(case, grid, dtype, seed=99)
        state = engine.state_dict()
        load(find_checkpoint(Path(folder)), state, grid)
        engine.load_state_dict(state)
        middle = whole_state(engine)
        train(engine, case, range(2, 5))
        return middle, whole_state(engine)


def case_of(zero, sizes, family, optimizer, shard_size=None, frozen=(), schedule="1f1b"):
    data, tensor, pipeline = sizes
    return Case(
        config=replace(FAMILIES[family], num_layers=4 if pipeline > 1 else 2),
        grid={"data": data, "tensor": tensor, "pipeline": pipeline},
        zero=zero,
        shard_size=shard_size,
        schedule=schedule if pipeline > 1 else None,
        bucket_bytes=1024,
        optimizer=OPTIMIZERS[optimizer],
        global_batch_size=12,
        sequence_length=12,
        micro_batch_size=3 if data != 3 else 2,
        frozen=frozen,
    )


def check(folder, first, second, dtype=torch.float64):
    layers = max(first.config.num_layers, second.config.num_layers)
    first, second = (replace(case, config=replace(case.config, num_layers=layers)) for case in (first, second))
    saved = run_ranks(save_and_go_on, math.prod(first.grid.values()), folder, first, dtype)
    loaded = run_ranks(load_and_go_on, math.prod(second.grid.values()), folder, second, dtype)
    assert_same(together([middle for middle, _ in loaded]), together([middle for middle, _ in saved]))
    unbroken, resumed = (together([end for _, end in results]) for results in (saved, loaded))
    assert unbroken.keys() == resumed.keys()
    if dtype == torch.float64:
        for part in ("parameters/", "optimizer/"):
            ends = [{n: t for n, t in state.items() if n.startswith(part)} for state in (resumed, unbroken)]
            error, name = worst_error(*ends)
            assert error < 1e-10, (name, error)
    return unbroken, resumed


@pytest.mark.parametrize(
    ("first", "second", "family", "optimizer"),
    [
        # zero, (data, tensor, pipeline)
        ((0, (1, 1, 1)), (3, (3, 1, 1)), "gpt2", "adamw"),
        ((3, (4, 1, 1)), (1, (2, 2, 1)), "llama", "muon"),
        ((1, (3, 1, 1)), (2, (2, 1, 2)), "gpt2", "muon"),
        ((2, (2, 2, 1)), (3, (2, 1, 2)), "qwen", "adamw"),
        ((3, (2, 1, 2)), (0, (1, 2, 1)), "qwen", "muon"),
        ((2, (4, 1, 1)), (1, (1, 1, 2)), "llama", "adamw"),
        ((3, (2, 2, 1)), (2, (3, 1, 1)), "gpt2", "adamw"),
    ],
    ids=str,
)
def test_a_run_goes_on_with_another_stage_on_another_grid(first, second, family, optimizer, tmp_path):
    check(str(tmp_path), *(case_of(zero, sizes, family, optimizer) for zero, sizes in (first, second)))


GRIDS = [(1, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]


def pairwise_cases():
    options = {
        "family": list(FAMILIES),
        "optimizer": list(OPTIMIZERS),
        "first_zero": [0, 1, 2, 3],
        "second_zero": [0, 1, 2, 3],
        "first": GRIDS,
        "second": GRIDS,
        "hybrid": [(False, False), (True, False), (False, True)],
        "schedule": ["1f1b", "zb_v", "interleaved_1f1b"],
        "frozen": [(), ("final_norm", "embedding", "blocks.0.")],
    }
    return pairwise(options, 41)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise_cases(), ids=lambda case: "-".join(map(str, case.values())))
def test_pairwise(case, tmp_path):
    both, zeros = [], (case["first_zero"], case["second_zero"])
    for zero, sizes, hybrid in zip(zeros, (case["first"], case["second"]), case["hybrid"], strict=True):
        shard_size = 2 if hybrid and zero and sizes[0] == 4 else None
        options = {"shard_size": shard_size, "frozen": case["frozen"], "schedule": case["schedule"]}
        both.append(case_of(zero, sizes, case["family"], case["optimizer"], **options))
    check(str(tmp_path), *both)


@pytest.mark.parametrize("frozen", [(), ("embedding", "blocks.0.")], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("first", "second"),
    [(0, 3), (3, 1), pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(3, 0, marks=pytest.mark.slow)],
)
def test_bits_of_bfloat16_and_its_main_weights_are_kept(first, second, frozen, tmp_path):
    """On the same grid whatever the stage the sums are of two ranks: the rest of the run has the same bits too."""
    cases = [case_of(zero, (2, 1, 1), "gpt2", "adamw", frozen=frozen) for zero in (first, second)]
    unbroken, resumed = check(str(tmp_path), *cases, dtype=torch.bfloat16)
    for name, tensor in unbroken.items():
        if name.startswith("parameters/"):
            assert tensor.dtype == torch.bfloat16
            main = unbroken.get(name.replace("parameters/", "optimizer/") + "/main")
            assert (main is None) == name.startswith(tuple(f"parameters/{item}" for item in frozen) or ("-",))
            if main is not None:
                assert main.dtype == torch.float32 and torch.equal(main.bfloat16(), tensor)
            else:
                assert torch.equal(resumed[name], tensor)
