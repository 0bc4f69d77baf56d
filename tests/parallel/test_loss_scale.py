"""A run in float16: one loss scale for the whole grid, searched, saved; losses as in float32."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import assert_same, modules_of, together, train, whole_state
from parity import FAMILIES, Case, build_engine, microbatches_of
from ranks import run_ranks

from gridtron.core import Grid
from gridtron.core.checkpoint.find import find_checkpoint
from gridtron.core.checkpoint.layout import step_path
from gridtron.core.checkpoint.load import load
from gridtron.core.checkpoint.save import save
from gridtron.core.optim.config import OptimizerConfig
from gridtron.core.precision import LossScaler
from gridtron.parallel import VocabParallelEmbedding, full_state_dict

ADAMW = OptimizerConfig("adamw", lr=6e-3, grad_clip=1.0, weight_decay=0.1)


def case_of(zero=0, sizes=(1, 1, 1), family="llama", **options):
    data, tensor, pipeline = sizes
    return Case(
        config=replace(FAMILIES[family], num_layers=2, init_std=0.1),
        grid={"data": data, "tensor": tensor, "pipeline": pipeline},
        zero=zero,
        schedule="1f1b" if pipeline > 1 else None,
        bucket_bytes=2048,
        optimizer=ADAMW,
        sequence_length=16,
        micro_batch_size=2,
        masks="all",
        **options,
    )


class Overflow(torch.autograd.Function):
    """The identity, whose gradient overflows."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + math.inf


def check_one_rank_overflows(case, bad_rank):
    """At step 2 the gradient of the embedding is inf in the last microbatch of one rank; before any sum."""
    with Grid.create(**case.grid) as grid:
        engine = build_engine(case, grid, torch.float16, LossScaler(1024, interval=3))
        rows = []
        for step in range(6):
            hooks = []
            if step == 2 and grid.rank == bad_rank:
                (embedding,) = modules_of(engine, VocabParallelEmbedding)
                hooks.append(embedding.register_forward_hook(lambda *a: Overflow.apply(a[2])))
            _, (outcome,) = train(engine, case, [step])
            for hook in hooks:
                hook.remove()
            assert outcome.applied == math.isfinite(outcome.grad_norm)
            counts = {name: float(v) for name, v in whole_state(engine).items() if name.endswith("/step")}
            norm = repr(outcome.grad_norm) if outcome.applied else "not finite"
            rows.append((outcome.applied, norm, engine.scaler.scale, engine.scaler.skipped, set(counts.values())))
        return rows, full_state_dict(engine.model, grid)


@pytest.mark.sample(4)
@pytest.mark.case(29)
@pytest.mark.parametrize(
    ("zero", "sizes", "bad_rank"),
    [
        (0, (2, 1, 1), 1),
        (1, (2, 1, 1), 0),
        (3, (2, 1, 1), 1),
        (2, (1, 2, 1), 1),
        (0, (1, 1, 2), 0),
        (2, (2, 2, 1), 3),
        (3, (2, 1, 2), 1),
        *(
            pytest.param(zero, (2, 2, 2), bad_rank, marks=pytest.mark.slow)
            for zero, bad_rank in ((0, 3), (1, 0), (2, 1), (3, 2))
        ),
    ],
)
def test_all_ranks_skip_the_step_in_which_one_overflows(zero, sizes, bad_rank):
    case = case_of(zero, sizes)
    results = run_ranks(check_one_rank_overflows, math.prod(sizes), case, bad_rank)
    rows, parameters = results[0]
    assert [applied for applied, *_ in rows] == [True, True, False, True, True, True]
    assert [row[2:4] for row in rows] == [(1024, 0), (1024, 0), (512, 1), (512, 1), (512, 1), (1024, 1)]
    assert [counts for *_, counts in rows] == [{1}, {2}, {2}, {3}, {4}, {5}]
    for other_rows, other_parameters in results:
        assert other_rows == rows
        assert_same(other_parameters, parameters)


def check_losses(case, dtype, scale):
    with Grid.create(**case.grid) as grid:
        scaler = LossScaler(scale, 8) if dtype == torch.float16 else None
        engine = build_engine(case, grid, dtype, scaler)
        # The same batch again and again: its loss falls.
        losses = []
        for _ in range(16):
            losses.append(engine.forward_backward(microbatches_of(case, grid, 0)).loss)
            assert engine.step(case.optimizer.lr).applied
        held = {tensor.dtype for tensor in full_state_dict(engine.model, grid, of="parameters").values()}
        states = {t.dtype for state in engine.optimizer.states().values() for t in state.values()}
        assert states == {torch.float32}
        return losses, held


@pytest.mark.sample(2)
@pytest.mark.parametrize(("zero", "sizes"), [(0, (1, 1, 1)), (1, (2, 1, 1)), (2, (1, 2, 2)), (3, (2, 2, 1))], ids=str)
def test_losses_in_float16_fall_as_in_float32(zero, sizes):
    case = case_of(zero, sizes)
    ((expected, _),) = run_ranks(check_losses, 1, case.plain(), torch.float32, 1.0)
    for losses, held in run_ranks(check_losses, math.prod(sizes), case, torch.float16, 4096.0):
        assert losses == pytest.approx(expected, rel=5e-3)
        assert losses[-1] < 0.7 * losses[0]
        assert held == ({torch.float16} if zero < 3 else {torch.float32})


def check_the_scale_changes_no_digit(case, scale):
    with Grid.create(**case.grid) as grid:
        engine = build_engine(case, grid, torch.float16, LossScaler(scale, 0))
        found = [engine.forward_backward(microbatches_of(case, grid, 0)).loss]
        gradients = full_state_dict(engine.model, grid, of="gradients")
        return [*found, engine.step(1e-3).grad_norm], gradients


def test_gradients_are_unscaled_before_anything_looks_at_them():
    """Norm, clipping and whole gradients know nothing of the scale, as long as nothing vanishes or overflows."""
    case = case_of(2, (2, 1, 1))
    results = [run_ranks(check_the_scale_changes_no_digit, 2, case, scale)[0] for scale in (2.0**12, 2.0**14)]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    for name, gradient in results[0][1].items():
        assert gradient.dtype == torch.float32
        assert torch.allclose(gradient, results[1][1][name], rtol=0.02, atol=1e-5), name


class Spiking:
    """Microbatches whose gradients overflow in some steps, whatever the scale."""

    def __init__(self, engine, steps):
        self.engine, self.steps = engine, steps

    def train(self, case, step):
        hooks = []
        if step in self.steps:
            for embedding in modules_of(self.engine, VocabParallelEmbedding):
                hooks.append(embedding.register_forward_hook(lambda *a: Overflow.apply(a[2])))
        (loss,), (outcome,) = train(self.engine, case, [step])
        for hook in hooks:
            hook.remove()
        scaler = self.engine.scaler
        return loss, outcome.applied, outcome.loss_scale, scaler.scale, scaler.good_steps, scaler.skipped


def run_from(case, folder, start, save_at=None):
    with Grid.create(**case.grid) as grid:
        first = LossScaler(2.0**8 if start else 2.0**12, interval=3)
        engine = build_engine(case, grid, torch.float16, first, seed=7 + start)
        spiking = Spiking(engine, (1, 4, 7))
        if start:
            state = engine.state_dict()
            load(find_checkpoint(Path(folder)), state, grid)
            engine.load_state_dict(state)
        rows = []
        for step in range(start, 10):
            rows.append(spiking.train(case, step))
            if step + 1 == save_at:
                save(step_path(Path(folder), save_at), engine.state_dict(), {}, grid)
        return rows, whole_state(engine)


@pytest.mark.case(35)
@pytest.mark.parametrize(
    ("zero", "sizes"),
    [(0, (1, 1, 1)), (3, (2, 1, 1)), *(pytest.param(z, (2, 1, 2), marks=pytest.mark.slow) for z in (1, 2))],
    ids=str,
)
def test_a_resumed_run_searches_on_to_the_bit(zero, sizes, tmp_path):
    case = case_of(zero, sizes, "gpt2")
    world_size = math.prod(sizes)
    unbroken = run_ranks(run_from, world_size, case, str(tmp_path), 0, 5)
    resumed = run_ranks(run_from, world_size, case, str(tmp_path), 5)
    rows = unbroken[0][0]
    assert [applied for _, applied, *_ in rows] == [step not in (1, 4, 7) for step in range(10)]
    assert [row[3:] for row in rows[4:6]] == [(2.0**10, 0, 2), (2.0**10, 1, 2)]
    for (whole, _), (tail, _) in zip(unbroken, resumed, strict=True):
        assert whole[5:] == tail
    assert_same(together([state for _, state in resumed]), together([state for _, state in unbroken]))
