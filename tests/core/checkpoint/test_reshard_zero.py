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
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.core.checkpoint.save import save
from gridtron.core.optim.config import OptimizerConfig

# A key bias has no gradient but rounding, which AdamW divides by eps: a larger one keeps it below the bound.
OPTIMIZERS = {
    "adamw": OptimizerConfig("adamw", lr=1e-3, grad_clip=1.0, weight_decay=0.1, eps=1e-6),
    "muon": OptimizerConfig("muon", lr=1e-3, grad_clip=1.0, weight_decay=0.1, momentum=0.9, eps=1e-6),
}


def save_and_go_on(folder, case, dtype, stop, last):
    """``stop`` steps, a checkpoint, and on to ``last``: the state at the checkpoint and at the end, and the losses."""
    with Grid.create(**case.grid) as grid:
        engine = build_engine(case, grid, dtype)
        train(engine, case, range(stop))
        save(step_path(Path(folder), stop), engine.state_dict(), {"step": stop}, grid)
        middle = whole_state(engine)
        losses, _ = train(engine, case, range(stop, last))
        return middle, whole_state(engine), losses


def load_and_go_on(folder, case, dtype, stop, last):
    """From other weights: the state that was loaded, that at the end, and the losses."""
    with Grid.create(**case.grid) as grid:
        engine = build_engine(case, grid, dtype, seed=99)
        state = engine.state_dict()
        load(find_checkpoint(Path(folder)), state, grid)
        engine.load_state_dict(state)
        middle = whole_state(engine)
        losses, _ = train(engine, case, range(stop, last))
        return middle, whole_state(engine), losses


def case_of(zero, sizes, family, optimizer, shard_size=None, frozen=(), schedule="1f1b", sequence_parallel=False):
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
        sequence_parallel=sequence_parallel and tensor > 1,
    )


def check(folder, first, second, dtype=torch.float64, stop=2, last=5, bound=1e-10):
    layers = max(first.config.num_layers, second.config.num_layers)
    first, second = (replace(case, config=replace(case.config, num_layers=layers)) for case in (first, second))
    saved = run_ranks(save_and_go_on, math.prod(first.grid.values()), folder, first, dtype, stop, last)
    loaded = run_ranks(load_and_go_on, math.prod(second.grid.values()), folder, second, dtype, stop, last)
    assert_same(together([middle for middle, _, _ in loaded]), together([middle for middle, _, _ in saved]))
    unbroken, resumed = (together([end for _, end, _ in results]) for results in (saved, loaded))
    assert unbroken.keys() == resumed.keys()
    if dtype == torch.float64:
        for part in ("parameters/", "optimizer/"):
            ends = [{n: t for n, t in state.items() if n.startswith(part)} for state in (resumed, unbroken)]
            error, name = worst_error(*ends)
            assert error < bound, (name, error)
        assert loaded[0][2] == pytest.approx(saved[0][2], rel=bound)
    return unbroken, resumed


@pytest.mark.parametrize(
    ("first", "second", "family", "optimizer"),
    [
        # zero, (data, tensor, pipeline)
        ((0, (1, 1, 1)), (3, (3, 1, 1)), "gpt2", "adamw"),
        ((3, (4, 1, 1)), (1, (2, 2, 1)), "llama", "muon"),
        pytest.param((1, (3, 1, 1)), (2, (2, 1, 2)), "gpt2", "muon", marks=pytest.mark.slow),
        pytest.param((2, (2, 2, 1)), (3, (2, 1, 2)), "qwen", "adamw", marks=pytest.mark.slow),
        pytest.param((3, (2, 1, 2)), (0, (1, 2, 1)), "qwen", "muon", marks=pytest.mark.slow),
        pytest.param((2, (4, 1, 1)), (1, (1, 1, 2)), "llama", "adamw", marks=pytest.mark.slow),
        pytest.param((3, (2, 2, 1)), (2, (3, 1, 1)), "gpt2", "adamw", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_goes_on_with_another_stage_on_another_grid(first, second, family, optimizer, tmp_path):
    check(str(tmp_path), *(case_of(zero, sizes, family, optimizer) for zero, sizes in (first, second)))


@pytest.mark.case(31)
@pytest.mark.parametrize(("first", "second"), [(2, 1), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_moments_follow_another_tensor_size_and_frozen_weights_have_none(first, second, tmp_path):
    """Ten steps and ten more against twenty."""
    frozen = ("embedding", "blocks.0.", "blocks.1.mlp")
    cases = [case_of(0, (1, size, 1), "qwen", "adamw", frozen=frozen) for size in (first, second)]
    unbroken, _ = check(str(tmp_path), *cases, stop=10, last=20, bound=1e-8)
    states = [name for name in unbroken if name.startswith("optimizer/")]
    assert states and not [name for name in states if name.removeprefix("optimizer/").startswith(frozen)]


GRIDS = [(1, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2),
         (1, 3, 1), (2, 4, 1), (1, 4, 2)]  # fmt: skip


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
        "sequence_parallel": [(False, False), (True, False), (True, True)],
    }
    return pairwise(options, 41)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise_cases(), ids=lambda case: "-".join(map(str, case.values())))
def test_pairwise(case, tmp_path):
    """Ten steps and ten more against twenty."""
    both, zeros = [], (case["first_zero"], case["second_zero"])
    grids, hybrids, sequence = (case["first"], case["second"]), case["hybrid"], case["sequence_parallel"]
    for zero, sizes, hybrid, split in zip(zeros, grids, hybrids, sequence, strict=True):
        shard_size = 2 if hybrid and zero and sizes[0] == 4 else None
        options = {"shard_size": shard_size, "frozen": case["frozen"], "schedule": case["schedule"]}
        options["sequence_parallel"] = split
        both.append(case_of(zero, sizes, case["family"], case["optimizer"], **options))
    check(str(tmp_path), *both, stop=10, last=20, bound=1e-8)


@pytest.mark.parametrize("frozen", [(), ("embedding", "blocks.0.")], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (0, 3),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(1, 0, marks=pytest.mark.slow),
        pytest.param(3, 0, marks=pytest.mark.slow),
    ],
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


def save_copied(folder, case):
    with Grid.create(**case.grid) as grid:
        engine = build_engine(case, grid, torch.float64)
        train(engine, case, range(1))
        save(step_path(Path(folder), 1), engine.state_dict(), {"step": 1}, grid, copies=2)


def places_of(folder, case):
    run_ranks(save_copied, math.prod(case.grid.values()), folder, case)
    return {name: entry.pieces for name, entry in Manifest.read(find_checkpoint(Path(folder))).tensors.items()}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_every_row_that_two_ranks_hold_is_written_twice(zero, tmp_path):
    """Replicas over data hold all at zero 0 and the weights at zero 1; over tensor what is whole there, over the
    pipeline the embedding of two stages."""
    tied = places_of(str(tmp_path / "data"), case_of(zero, (2, 2, 1), "qwen", "adamw"))
    for name, pieces in tied.items():
        held_twice = zero == 0 or (zero == 1 and name.startswith("parameters/")) or "norm" in name or "/step" in name
        for piece in pieces:
            files = [file for file, _ in piece.places]
            assert len(files) == len(set(files)) == (2 if held_twice else 1), (name, files)
    stages = places_of(str(tmp_path / "pipeline"), case_of(zero, (1, 1, 2), "qwen", "adamw"))
    twice = {name for name, pieces in stages.items() if all(piece.copies for piece in pieces)}
    assert {name for name in stages if "/embedding." in name} <= twice
    assert not [name for name in twice if "blocks." in name]
