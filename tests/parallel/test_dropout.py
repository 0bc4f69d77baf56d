"""Dropout belongs to the sample: equal over ranks, recomputation, and whatever else draws random numbers."""

from dataclasses import replace

import pytest
import torch
from parity import FAMILIES, Case, global_batch
from ranks import run_ranks
from torch import nn

from gridtron.core import Grid
from gridtron.models import GPT
from gridtron.parallel import Dropout, SampleContext, activation_checkpoint, full_state_dict
from gridtron.parallel.recompute import RecomputeConfig


def gradients_of(recompute, family="llama", sequence_parallel=False, grid=None, context=True, layers=None):
    config = replace(FAMILIES[family], dropout=0.2, attention_dropout=0.2)
    model = GPT(
        config,
        grid,
        seed=3,
        sequence_parallel=sequence_parallel,
        recompute=RecomputeConfig(recompute, layers),
        dtype=torch.float64,
    )
    batch = global_batch(Case(config), 0)
    samples = SampleContext(batch.sample_indices) if context else None
    losses = [model(batch.tokens, batch.targets, context=samples).sum() for _ in range(2)]
    sum(losses).backward()
    return [float(loss) for loss in losses], full_state_dict(model, of="gradients")


def check_recompute(family, sequence_parallel):
    with Grid.create(tensor=-1) as grid:
        for context in (True, False):
            before = torch.get_rng_state()
            losses, expected = gradients_of("none", family, sequence_parallel, grid, context)
            assert context == (losses[0] == losses[1]), "calls without a context draw different masks"
            for recompute, layers in (("selective", None), ("full", None), ("full", 1)):
                again, gradients = gradients_of(recompute, family, sequence_parallel, grid, context, layers)
                assert again == losses
                for name, gradient in gradients.items():
                    assert torch.equal(gradient, expected[name]), (recompute, name)
            assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.sample(3)
@pytest.mark.case(23)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("world_size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_recomputation_is_equal_to_the_bit(family, world_size, sequence_parallel):
    run_ranks(check_recompute, world_size, family, sequence_parallel)


@pytest.mark.case(23)
def test_closures_and_torch_dropout_recompute_alike():
    own, theirs, linear = Dropout(0.5), nn.Dropout(0.5), nn.Linear(8, 8)
    x = torch.randn(6, 2, 8, requires_grad=True)

    def function(x):
        return theirs(own(linear(x))).square()

    def gradient(policy):
        own.calls = 0
        torch.manual_seed(1)
        y = activation_checkpoint(function, x, policy=policy)
        y = y + activation_checkpoint(function, x, policy=policy)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return y, grad, own.calls

    for a, b in zip(gradient("none"), gradient("full"), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    with pytest.raises(ValueError, match="policy='all'"):
        activation_checkpoint(function, x, policy="all")


def check_other_draws():
    """Rank 0 draws from torch's generators between steps (a loader's seed, an evaluation); masks must not drift."""
    with Grid.create(tensor=-1) as grid:
        config = replace(FAMILIES["llama"], dropout=0.1, attention_dropout=0.1)
        model = GPT(config, grid, seed=3, dtype=torch.float64)
        masks = []
        model.embedding_dropout.register_forward_hook(lambda _, __, out: masks.append(out.detach().clone()))
        for step in range(5):
            if grid.rank == 0:
                torch.randn(step + 1)
                next(iter(torch.utils.data.DataLoader(torch.arange(4), shuffle=True)))
                model.eval()
                with torch.no_grad():
                    model.embedding_dropout(torch.ones(2, 2, 16, dtype=torch.float64))
                model.train()
                masks.pop()
            batch = global_batch(Case(config), step)
            model(batch.tokens, batch.targets, context=SampleContext(batch.sample_indices)).sum().backward()
        return masks


@pytest.mark.case(22)
def test_masks_do_not_depend_on_other_draws():
    first, second = run_ranks(check_other_draws, 2)
    assert len(first) == 5
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0] == 0, first[1] == 0), "every sample has its own mask"


def test_without_context_every_call_has_its_own_mask():
    dropout = Dropout(0.5, key=1)
    x = torch.ones(16, 4, 32)
    a, b = dropout(x), dropout(x)
    assert not torch.equal(a, b)
    assert torch.equal(Dropout(0.5, key=1)(x), a)
    assert dropout.eval()(x) is x
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match="at least 0 and under 1"):
            Dropout(p)
