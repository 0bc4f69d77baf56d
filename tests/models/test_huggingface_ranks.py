"""Hugging Face's weights on several ranks: logits of transformers over tensor and pipeline axes, each rank its rows.

Workers do not import transformers: this process writes what it computes to files first.
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from engines import whole_state
from parity import Case, microbatches_of
from ranks import run_ranks

from gridtron.core import Grid
from gridtron.core.checkpoint.config import CheckpointConfig
from gridtron.core.optim.config import OptimizerConfig
from gridtron.core.pieces import gather_whole
from gridtron.core.sharding import Sharding
from gridtron.models import GPT
from gridtron.models.huggingface import load_huggingface, read_config
from gridtron.models.huggingface.folder import Folder
from gridtron.parallel import full_state_dict
from gridtron.parallel.parameters import named_parameters

NAMES = ("llama", "llama_biases", "llama_tied", "llama31", "yarn", "mistral", "qwen2", "gpt2", "neox")
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
CASES = [(name, torch.float64) for name in NAMES] + [("llama", torch.float32), ("gpt2", torch.float32)]


@pytest.fixture(scope="module")
def models(folder):
    """The folder, with transformers' logits beside each model."""
    import hugging

    torch.save(hugging.tokens()[0], folder / "tokens.pt")
    for name in NAMES:
        hugging.saved(name, folder)
    for name, dtype in CASES:
        torch.save(hugging.results(name, dtype)["logits"], folder / f"{name}-{dtype}.pt")
    return folder


def logits_of(model, grid, tokens):
    """(batch, sequence, vocabulary), on the last pipeline rank; None on the others."""
    x, axis = tokens, grid.pipeline
    (stage,) = model.stages.values()
    if axis.rank > 0:
        dtype = next(model.parameters()).dtype
        order = tokens.shape[::-1] if stage.sequence_first else tokens.shape
        x = torch.empty(*order, model.config.hidden_size, dtype=dtype)
        dist.recv(x, axis.ranks[axis.rank - 1])
    x = stage(x)
    if axis.rank < axis.size - 1:
        dist.send(x.contiguous(), axis.ranks[axis.rank + 1])
        return None
    shape = (*tokens.shape, model.config.vocab_size)
    return gather_whole(x.contiguous(), Sharding.split(shape, 2, grid.tensor.size), grid.tensor)


def largest_error(path, sizes):
    """Of each model and precision, on this rank."""
    errors = {}
    tokens = torch.load(path / "tokens.pt")
    with Grid.create(**sizes) as grid, torch.no_grad():
        for name, dtype in CASES:
            model = GPT(read_config(path / name), grid, seed=3, dtype=dtype).eval()
            load_huggingface(model, path / name, grid)
            logits = logits_of(model, grid, tokens)
            if logits is not None:
                errors[name, dtype] = float((logits - torch.load(path / f"{name}-{dtype}.pt")).abs().max())
    return errors


@pytest.mark.case(11, 39)
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2},
        {"pipeline": 2},
        pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 4}, marks=pytest.mark.slow),
        pytest.param({"tensor": 3}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_logits_on_every_grid(models, sizes):
    found = run_ranks(largest_error, torch.tensor(list(sizes.values())).prod().item(), models, sizes)
    assert len(found[-1]) == len(CASES)
    for errors in found:
        for (name, dtype), error in errors.items():
            assert error < BOUNDS[dtype], (name, dtype, error)


# ---------------------------------------------------------------- what a rank reads
class Counted(Folder):
    """Remembers the largest slice of each tensor."""

    largest: dict[str, int]

    def slice(self, name, *ranges):
        found = super().slice(name, *ranges)
        self.largest[name] = max(self.largest.get(name, 0), found.numel())
        return found


def slices_on_a_rank(path, sizes, zero):
    """Largest slices that were read of matrices, and the most that one parameter has here."""
    from gridtron.models.huggingface import reading
    from gridtron.parallel.data_parallel.fsdp import local_part
    from gridtron.parallel.data_parallel.wrapper import DataParallel

    before, Counted.largest = reading.Folder, {}
    reading.Folder = Counted
    try:
        with Grid.create(**sizes) as grid:
            model = GPT(read_config(path), grid, seed=0)
            if zero == 3:
                model = DataParallel(model, grid.data, zero=3)
            load_huggingface(model, path, grid)
            split = [item for item in named_parameters(model) if item.parameter.ndim == 2]
            held = [(local_part(p.parameter) if zero == 3 else p.parameter).numel() for p in split]
            return Counted.largest, max(held), [p.parameter.shape for p in split if p.sharding.dim is None and not zero]
    finally:
        reading.Folder = before


@pytest.mark.parametrize(("sizes", "zero"), [({"tensor": 2}, 0), ({"data": 2}, 3)])
@pytest.mark.parametrize("name", ["llama", "neox"])
def test_a_rank_reads_its_rows_and_no_more(models, name, sizes, zero):
    for largest, held, whole in run_ranks(slices_on_a_rank, 2, models / name, sizes, zero):
        assert not whole  # every matrix is split
        assert max(largest.values()) <= held
        embedding = next(key for key in largest if "embed_tokens" in key or "embed_in" in key)
        assert largest[embedding] < 0.55 * 101 * (48 if name == "neox" else 24)


# ---------------------------------------------------------------- a run that begins with them
def begun(path, sizes, zero, dtype, schedule):
    """Losses of two steps at rate 0, and the whole state before and after."""
    from parity import build_engine

    from gridtron.conf.schema import Plan
    from gridtron.tools.warm_start import warm_start

    config = replace(read_config(path), dropout=0.0, attention_dropout=0.0)
    optimizer = OptimizerConfig("adamw", lr=0.0, grad_clip=1.0)
    case = Case(config=config, grid=sizes, zero=zero, micro_batch_size=2, schedule=schedule, optimizer=optimizer)
    plan = Plan(model=config, checkpoint=CheckpointConfig(init_from=str(path)))
    with Grid.create(**sizes) as grid:
        engine = build_engine(case, grid, dtype)
        notes = warm_start(plan, grid, engine, {})
        before = {name: tensor.clone() for name, tensor in whole_state(engine).items()}
        parameters = full_state_dict(engine.model, grid)
        losses = []
        for _ in range(2):
            losses.append(engine.forward_backward(microbatches_of(case, grid, 0)).loss)
            engine.step(0.0)
        return notes, losses, before, whole_state(engine), parameters, full_state_dict(engine.model, grid)


@functools.cache
def begun_alone(path):
    """Loss and weights of the same run in one process in float32."""
    ((_, losses, _, _, parameters, _),) = run_ranks(begun, 1, path, {}, 0, torch.float32, None)
    return losses[0], parameters


def runs():
    """Axes and stages of ZeRO; in make test both formats of some."""
    for sizes, zero, schedule in (
        ({"data": 2}, 3, None),
        ({"pipeline": 2}, 0, "1f1b"),
        ({"data": 2}, 1, None),
        ({"data": 2}, 2, None),
        ({"tensor": 2}, 0, None),
        ({}, 0, None),
        ({"data": 2}, 0, None),
        ({"tensor": 2, "data": 2}, 3, None),
        ({"pipeline": 2, "data": 2}, 1, "1f1b"),
    ):
        for name, dtype in itertools.product(("gpt2", "llama"), (torch.bfloat16, torch.float32)):
            often = sizes and len(sizes) < 2 and name == "gpt2" and dtype == torch.bfloat16 and zero != 2
            slow = () if often else pytest.mark.slow
            yield pytest.param(sizes, zero, schedule, name, dtype, id=f"{sizes}-{zero}-{name}-{dtype}", marks=slow)


@pytest.mark.sample(3)
@pytest.mark.case(9)
@pytest.mark.parametrize(("sizes", "zero", "schedule", "name", "dtype"), list(runs()))
def test_a_run_begins_with_them(models, sizes, zero, schedule, name, dtype):
    """Parameters are the weights, main weights are theirs in full, and a step at rate 0 changes neither."""
    size = torch.tensor([1, *sizes.values()]).prod().item()
    expected, whole = begun_alone(models / name)
    results = run_ranks(begun, size, models / name, sizes, zero, dtype, schedule)
    for notes, losses, before, after, parameters, later in results:
        assert f"{models / name} ({name})" in notes[0]
        assert losses[0] == losses[1] and losses[0] == pytest.approx(
            expected, rel=1e-5 if dtype.itemsize == 4 else 0.02
        )
        assert parameters.keys() == whole.keys() == later.keys()
        for key, tensor in whole.items():
            assert torch.equal(parameters[key].to(dtype), tensor.to(dtype)), key
            assert torch.equal(parameters[key], later[key]), key
        mains = [key for key in before if key.endswith("/main")]
        assert bool(mains) == (dtype == torch.bfloat16)
        for key in mains:
            assert torch.equal(before[key].view(-1), whole[key.split("/")[1]].view(-1)), key
            assert torch.equal(after[key], before[key]), key
