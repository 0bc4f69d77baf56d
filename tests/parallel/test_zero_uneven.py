"""Data ranks with different numbers of microbatches, some with none: as one process, or refused on all ranks."""

from dataclasses import replace

import pytest
import torch
from parity import FAMILIES, Case, build_engine, global_batch, split, worst_error
from ranks import run_ranks

from gridtron.core import Grid
from gridtron.core.errors import JobError
from gridtron.core.optim.config import OptimizerConfig
from gridtron.parallel import full_state_dict

CASE = Case(
    config=replace(FAMILIES["gpt2"], num_layers=1),
    # A key bias has no gradient but rounding, which AdamW divides by eps.
    optimizer=OptimizerConfig("adamw", lr=1e-3, grad_clip=1.0, weight_decay=0.1, eps=1e-6),
    sequence_length=12,
    micro_batch_size=2,
    bucket_bytes=1024,
)


def samples(step, count, masks):
    batch = global_batch(replace(CASE, global_batch_size=2 * count, masks=masks), step)
    return split(batch, count)


def train_unevenly(case, numbers, masks):
    """Each data rank takes its number of the microbatches of three steps."""
    with Grid.create(**case.grid) as grid:
        engine = build_engine(case, grid)
        first = sum(numbers[: grid.data.rank])
        losses, norms = [], []
        for step in range(3):
            own = samples(step, sum(numbers), masks)[first : first + numbers[grid.data.rank]]
            losses.append(engine.forward_backward(own).loss)
            norms.append(engine.step(case.optimizer.lr).grad_norm)
            losses.append(engine.evaluate(own).loss)
        return losses, norms, full_state_dict(engine.model, grid)


@pytest.mark.sample(8)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("numbers", "masks"), [((3, 2), "uneven"), ((1, 0), "all"), ((0, 2), "uneven"), ((2, 2), "one_rank")], ids=str
)
def test_uneven_microbatches_are_those_of_one_process(zero, numbers, masks):
    ((losses, norms, parameters),) = run_ranks(train_unevenly, 1, CASE, (sum(numbers),), masks)
    case = replace(CASE, zero=zero, grid={"data": 2})
    for found_losses, found_norms, found in run_ranks(train_unevenly, 2, case, numbers, masks):
        assert found_losses == pytest.approx(losses, rel=1e-10)
        assert found_norms == pytest.approx(norms, rel=1e-10)
        error, name = worst_error(found, parameters)
        assert error < 1e-10, (name, error)


def refuse_under_a_pipeline(case):
    with Grid.create(**case.grid) as grid:
        engine = build_engine(case, grid)
        before = full_state_dict(engine.model, grid)
        own = samples(0, 2, "all")
        with pytest.raises(JobError, match="data ranks have 2, 1 microbatches") as told:
            engine.forward_backward(own[: 2 - grid.data.rank])
        assert told.value.agreed
        # Nothing was begun: the next step is as any other.
        assert torch.isfinite(torch.tensor(engine.forward_backward(own).loss))
        assert engine.step(0.0).applied
        assert all(torch.equal(tensor, before[name]) for name, tensor in full_state_dict(engine.model, grid).items())


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_under_a_pipeline_they_are_refused_on_every_rank(zero):
    grid = {"data": 2, "pipeline": 2}
    config = replace(CASE.config, num_layers=2)
    run_ranks(refuse_under_a_pipeline, 4, replace(CASE, config=config, zero=zero, grid=grid, schedule="1f1b"))
