"""Compiled layers: the numbers of uncompiled ones, one graph for all layers that are alike, nothing else changed."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import parity
import pytest
import torch
from parity import FAMILIES, Case, build_engine, hold, microbatches_of, run_case
from ranks import run_ranks

from gridtron.conf.compose import Refusal, compose
from gridtron.conf.rules import Surroundings, compiler_fault
from gridtron.core import Grid, Ledger
from gridtron.core.capabilities import Capabilities
from gridtron.models import GPT
from gridtron.models.compiled import compile_layers
from gridtron.parallel import SampleContext, full_state_dict
from gridtron.parallel.recompute import RecomputeConfig

# Traces as any backend does, and makes no code: seconds instead of minutes.
BACKEND = "aot_eager"


@contextmanager
def compiled(backend=BACKEND):
    """Models that the harness builds are compiled."""
    with mock.patch.object(parity, "GPT", lambda *args, **kwargs: compile_layers(GPT(*args, **kwargs), backend)):
        yield


def run_compiled(case):
    with compiled():
        return run_case(case)


COMPILED = [
    {"grid": {"tensor": 2}, "sequence_parallel": True},
    {"grid": {"data": 2}, "zero": 1, "micro_batch_size": 2, "recompute": "selective"},
    {"grid": {"tensor": 2}, "recompute": "full"},
    {"grid": {"data": 2}, "zero": 3, "micro_batch_size": 2},
    {"grid": {"tensor": 2, "pipeline": 2}, "sequence_parallel": True, "schedule": "1f1b", "micro_batch_size": 2},
    {"grid": {"pipeline": 2}, "schedule": "zb_h1", "micro_batch_size": 2},
    {"grid": {"pipeline": 2}, "schedule": "zb_v", "recompute": "full", "micro_batch_size": 2},
    {"grid": {"tensor": 3}, "recompute": "selective"},
]


def grids():
    """Every family on every grid; two of them in make test: tracing takes seconds, whatever the size."""
    quick = [("gpt2", COMPILED[0]), ("gpt2", COMPILED[1])]
    return [
        pytest.param(family, options, marks=() if (family, options) in quick else pytest.mark.slow)
        for options in COMPILED
        for family in FAMILIES
    ]


@pytest.mark.parametrize(("family", "options"), grids(), ids=str)
def test_a_run_does_not_depend_on_it(family, options):
    layers = 4 if options.get("schedule") == "zb_v" else 2
    config = replace(FAMILIES[family], num_layers=layers, dropout=0.1, attention_dropout=0.1)
    hold(config, 1e-12, run=run_compiled, **options)


def losses_and_gradients(config, backend, tokens, grid=None, sequence_parallel=False, dtype=torch.float64):
    model = GPT(config, grid, seed=3, sequence_parallel=sequence_parallel, dtype=dtype)
    if backend is not None:
        compile_layers(model, backend)
    context = SampleContext(torch.arange(tokens.shape[0]))
    losses = model(tokens, tokens.roll(-1, 1), context)
    losses.sum().backward()
    return losses.detach(), full_state_dict(model, grid, of="gradients"), model


def test_layers_that_are_alike_share_a_graph():
    """Dropout's keys differ from layer to layer, and no other layer is compiled for it."""
    config = replace(FAMILIES["llama"], num_layers=5, dropout=0.1, attention_dropout=0.1)
    tokens = torch.randint(0, 101, (2, 12))
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain, gradients, _ = losses_and_gradients(config, None, tokens)
    found, others, model = losses_and_gradients(config, counting, tokens)
    assert len(graphs) == 1
    assert torch.allclose(found, plain, rtol=1e-12, atol=1e-12)
    assert all(torch.allclose(others[name], gradients[name], rtol=1e-11, atol=1e-11) for name in gradients)
    model.eval()
    with torch.no_grad():
        # Another length, and no masks: two more.
        for length in (12, 8, 12, 8):
            assert model(tokens[:, :length]).shape == (2, length, 101)
    assert len(graphs) == 3


def test_nothing_else_changes():
    plain, changed = (GPT(FAMILIES["gpt2"], seed=1, dtype=torch.float64) for _ in range(2))
    compile_layers(changed, BACKEND)
    assert list(changed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in changed.named_modules()] == [name for name, _ in plain.named_modules()]
    assert full_state_dict(changed).keys() == full_state_dict(plain).keys()


def test_a_break_of_the_graph_is_an_error():
    model = compile_layers(GPT(FAMILIES["llama"], seed=1), BACKEND)
    block = model.blocks["0"]
    forward = block.mlp.forward

    def breaking(x):
        torch._dynamo.graph_break()
        return forward(x)

    block.mlp.forward = breaking
    with pytest.raises(Exception, match="graph_break"):
        model(torch.zeros(1, 4, dtype=torch.int64))


def check_ledger():
    case, tables = Case(grid={"tensor": 2}, sequence_parallel=True), []
    for surroundings in (mock.MagicMock(), compiled()):
        with Grid.create(**case.grid) as grid, surroundings:
            engine = build_engine(case, grid)
            with Ledger(grid) as ledger:
                engine.forward_backward(microbatches_of(case, grid, 0))
            tables.append(ledger.table())
    return tables


def test_a_ledger_counts_what_runs_uncompiled():
    for plain, found in run_ranks(check_ledger, 2):
        assert plain == found and plain["tensor", "reduce_scatter"][0] > 0


def test_a_list_of_operations_is_refused():
    recompute = RecomputeConfig("selective", operations=["attention"])
    with pytest.raises(ValueError, match="a list does not go with compiled layers"):
        compile_layers(GPT(FAMILIES["llama"], recompute=recompute, device="meta"))


# ---------------------------------------------------------------- what is refused
LIBRARIES = Capabilities(2, ("a device",), bf16=True, nccl=True, triton=None, apex="nvidia")
AROUND = Surroundings(cores=64, data_fault=lambda config: None, folder_fault=lambda folder: None, libraries=LIBRARIES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grid.pipeline=2", "pipeline=zb_v", "model.num_layers=4"], r"gains nothing; nearest: pipeline.schedule=1f1b"),
        (["recompute=selective", "recompute.operations=[attention]"], r"\[attention\] with train.compile=true: a comp"),
        (["recompute=auto", "recompute.budget_bytes=64e9"], r"nearest: recompute.mode=selective"),
        (
            ["kernels.backend=apex"],
            r"rms_norm, layer_norm, scaled_masked_softmax cannot be trusted.*kernels.rms_norm=auto",
        ),
        (["model.build=torch.nn:Identity"], r"layers of a model of your own"),
    ],
)
def test_refused_before_anything_starts(words, message):
    with pytest.raises(Refusal, match=message):
        compose(["model=tiny", "train.compile=true", *words], surroundings=AROUND)


def test_a_compiler_that_is_not_there(tmp_path):
    assert compiler_fault(0, {"CXX": str(tmp_path / "g++")}) == (
        f"on a CPU torch.compile needs a C++ compiler, and {tmp_path / 'g++'} is not there"
    )
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    assert compiler_fault(0, {"CXX": str(tmp_path / "c++")}) is None
    around = replace(AROUND, compiler_fault="there is none")
    with pytest.raises(Refusal, match=r"train.compile=true: there is none; nearest: train.compile=false"):
        compose(["model=tiny", "train.compile=true"], surroundings=around)
    assert compose(["model=tiny"], surroundings=around).train.compile is False


def test_accepted():
    for words in (["train=compiled"], ["train.compile=true", "grid.pipeline=2", "recompute=full"]):
        assert compose(["model=tiny", *words], surroundings=AROUND).train.compile


# ---------------------------------------------------------------- real code
def check_inductor(sequence_parallel):
    with Grid.create(tensor=-1) as grid:
        config, tokens = replace(FAMILIES["llama"], dropout=0.1), torch.randint(0, 101, (2, 12))
        found = [
            losses_and_gradients(config, backend, tokens, grid, sequence_parallel)[:2] for backend in (None, "inductor")
        ]
        (plain, gradients), (losses, others) = found
        assert torch.allclose(losses, plain, rtol=1e-12, atol=1e-12)
        assert all(torch.allclose(others[name], gradients[name], rtol=1e-10, atol=1e-10) for name in gradients)


@pytest.mark.slow
@pytest.mark.skipif(compiler_fault(0, {}) is not None, reason="no C++ compiler")
@pytest.mark.parametrize(("world_size", "sequence_parallel"), [(1, False), (2, True)])
@pytest.mark.timeout(600)
def test_inductor(world_size, sequence_parallel):
    run_ranks(check_inductor, world_size, sequence_parallel, timeout=500)
