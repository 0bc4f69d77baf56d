"""A model takes the kernels that it is told, and trains as it does with torch's. Triton runs in its interpreter."""

import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from interpreted import interpreted
from parity import FAMILIES, Case, build_engine, global_batch, hold, microbatches_of, run_case, worst_error
from torch.utils._python_dispatch import TorchDispatchMode

from gridtron.core import Grid
from gridtron.core.kernels.config import KernelsConfig
from gridtron.core.optim.config import OptimizerConfig
from gridtron.models import GPT
from gridtron.parallel import SampleContext, full_state_dict
from gridtron.parallel.operations import KEPT
from gridtron.parallel.recompute import RecomputeConfig

# A key's bias has a gradient of zero: without eps AdamW would make steps of its rounding.
ADAMW = OptimizerConfig("adamw", lr=1e-3, eps=1e-4, weight_decay=0.1, grad_clip=1.0)
BACKENDS = ("triton", "torch")


@pytest.fixture(scope="module")
def interpreter():
    pytest.importorskip("triton")
    with interpreted():
        yield


def case_of(family, backend, dropout=0.1, **changes):
    chunked_loss = changes.pop("chunked_loss", False)
    return Case(
        config=replace(FAMILIES[family], dropout=dropout, attention_dropout=dropout),
        kernels=KernelsConfig(backend, chunked_loss=chunked_loss),
        **{"global_batch_size": 4, "micro_batch_size": 4, "sequence_length": 12, "optimizer": ADAMW} | changes,
    )


class Operators(TorchDispatchMode):
    """Counts this project's operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "gridtron":
            self.counts[function.__name__.partition(".")[0]] += 1
        return function(*arguments, **(keywords or {}))


def train(case, dtype=torch.float64, recompute=None):
    """Loss, gradients and the parameters after one step of the engine, and the operators that ran."""
    with Grid.create() as grid, Operators() as operators:
        engine = build_engine(case, grid, dtype, recompute=recompute)
        loss = engine.forward_backward(microbatches_of(case, grid, 0)).loss
        gradients = full_state_dict(engine.model, grid, of="gradients") if dtype == torch.float64 else {}
        engine.step(case.optimizer.lr)
        return loss, gradients, full_state_dict(engine.model, grid), operators.counts


@pytest.mark.parametrize("chunked_loss", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_of_triton_is_a_step_of_torch(family, chunked_loss, interpreter):
    found, expected = (train(case_of(family, backend, chunked_loss=chunked_loss)) for backend in BACKENDS)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for ours, theirs in zip(found[1:3], expected[1:3], strict=True):
        error, name = worst_error(ours, theirs)
        assert error < 1e-12, name
    activation, norm = ("swiglu", "rms_norm") if family == "llama" else ("bias_gelu", "layer_norm")
    used = {activation, norm, "dropout_add", "scaled_masked_softmax", "cross_entropy_statistics"}
    used |= {"rope"} if family == "llama" else set()
    assert used <= found[3].keys()
    # The softmax is one operator for both.
    assert not (used - {"scaled_masked_softmax"}) & expected[3].keys()


def test_narrow_weights_beside_wide_ones(interpreter):
    """AdamW's kernel writes the model's bfloat16 weights with the main ones."""
    found, expected = (train(case_of("llama", backend), torch.bfloat16) for backend in BACKENDS)
    assert found[0] == pytest.approx(expected[0], rel=1e-2)
    error, name = worst_error(*({k: v.float() for k, v in one[2].items()} for one in (found, expected)))
    assert error < 1e-2, name


RECOMPUTE = {
    "full": RecomputeConfig("full"),
    "selective": RecomputeConfig("selective"),
    "keep all": RecomputeConfig("selective", operations=[]),
    "attention": RecomputeConfig("selective", operations=["attention"]),
    "dropout": RecomputeConfig("selective", operations=["dropout"]),
}


@pytest.fixture(scope="module")
def recomputed(interpreter):
    """What a small step gives under each, by Triton's kernels."""
    case = case_of("gpt2", "triton", global_batch_size=2, micro_batch_size=2, sequence_length=6)
    case = replace(case, config=replace(case.config, num_layers=1))
    return {name: train(case, recompute=options) for name, options in {"none": None, **RECOMPUTE}.items()}


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recomputed_kernels_give_the_same_bits(name, recomputed):
    (loss, *tensors, _), (expected, *theirs, _) = recomputed[name], recomputed["none"]
    assert loss == expected
    for ours, other in zip(tensors, theirs, strict=True):
        assert all(torch.equal(ours[key], tensor) for key, tensor in other.items())


def test_kept_operators_do_not_run_again(recomputed):
    """By their names in parallel.operations, whichever implementation runs: dropout is kept, or run again."""
    none, kept, dropped = (recomputed[name][3] for name in ("none", "keep all", "dropout"))
    assert kept["dropout_add"] == none["dropout_add"]
    assert dropped["dropout_add"] == none["dropout_add"] + 3  # after attention, after the MLP, and on its weights
    assert kept["scaled_masked_softmax"] == dropped["scaled_masked_softmax"] == none["scaled_masked_softmax"]
    assert kept["layer_norm"] == none["layer_norm"] + 2
    assert set(KEPT["dropout"]) == {"gridtron.counted_dropout", "gridtron.dropout_add"}


# ---------------------------------------------------------------- without logits
CHUNKED = KernelsConfig(chunked_loss=True)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"grid": {"tensor": 2}, "sequence_parallel": True}),
        ("gpt2", {"grid": {"tensor": 2}}),
        ("gpt2", {"grid": {"pipeline": 2}, "schedule": "zb_v", "micro_batch_size": 2}),
        ("llama", {"grid": {"data": 2}, "zero": 3}),
    ],
)
def test_chunked_loss_over_grids(family, options):
    layers = {"num_layers": 4} if "schedule" in options else {}
    config = replace(FAMILIES[family], dropout=0.1, attention_dropout=0.1, **layers)
    hold(config, kernels=CHUNKED, **options)


def interpreted_case(case):
    with interpreted():
        return run_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("chunked_loss", [False, True])
def test_triton_over_two_tensor_ranks(chunked_loss):
    pytest.importorskip("triton")
    kernels = KernelsConfig("triton", chunked_loss=chunked_loss)
    config = replace(FAMILIES["llama"], dropout=0.1, attention_dropout=0.1)
    hold(config, run=interpreted_case, grid={"tensor": 2}, sequence_parallel=True, kernels=kernels)


# ---------------------------------------------------------------- a step without a target
@pytest.mark.case(3)
@pytest.mark.parametrize("chunked_loss", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_tokens(backend, chunked_loss, interpreter):
    """Every loss: zero with a graph, zero gradients, one warning for the run, finite parameters after the steps."""
    case = case_of(
        "llama", backend, 0.0, chunked_loss=chunked_loss, masks="none", global_batch_size=2, sequence_length=6
    )
    batch = global_batch(case, 0)
    model = GPT(case.config, seed=0, dtype=torch.float64, kernels=case.kernels)
    losses = model(batch.tokens, batch.targets, SampleContext(batch.sample_indices))
    assert losses.grad_fn is not None and torch.equal(losses, torch.zeros_like(losses))
    with Grid.create() as grid, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = build_engine(case, grid)
        for step in range(2):
            assert engine.forward_backward(microbatches_of(replace(case, micro_batch_size=2), grid, step)).loss == 0.0
            gradients = full_state_dict(engine.model, grid, of="gradients")
            assert gradients and not any(tensor.any() for tensor in gradients.values())
            assert engine.step(1e-3).applied
        assert all(torch.isfinite(tensor).all() for tensor in full_state_dict(engine.model, grid).values())
    assert len([one for one in caught if "no token" in str(one.message)]) == 1
