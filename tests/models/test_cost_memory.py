"""Bytes by formula: against the published ones, against what autograd keeps, against torch's MemTracker."""

import gc
import itertools
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from parity import FAMILIES, LLAMA
from ranks import run_ranks
from torch.distributed._tools.mem_tracker import MemTracker

from gridtron.core import Grid
from gridtron.core.kernels.config import KernelsConfig
from gridtron.models import GPT, GPTConfig
from gridtron.models.cost.activations import NOT_IN_THE_PAPER, Microbatch, layer_activations, stage_activations
from gridtron.models.cost.memory import (
    MemorySettings,
    activation_bytes,
    rank_memory,
    rank_parameters,
    travelling_bytes,
)
from gridtron.parallel import SampleContext
from gridtron.parallel.pipeline import build_schedule
from gridtron.parallel.recompute import RecomputeConfig, layer_policies

FORMULAE = json.loads((Path(__file__).parent.parent / "published" / "korthikanti2022_formulae.json").read_text())
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


# ---------------------------------------------------------------- Korthikanti et al. 2022
def paper_model(h, a, L=2, v=51200, s=2048):
    """The paper's: an MLP of 4 h with GELU, as many key as query heads, dropout everywhere."""
    return GPTConfig(
        num_layers=L,
        hidden_size=h,
        num_attention_heads=a,
        vocab_size=v,
        max_position_embeddings=s,
        normalization="layer_norm",
        position="learned",
        activation="gelu",
        bias=True,
        tie_embeddings=True,
        dropout=0.1,
        attention_dropout=0.1,
    )


def counted(kept):
    return sum(size for name, size in kept.items() if name not in NOT_IN_THE_PAPER)


SHAPES = [(s, b, h, a, t) for s in (512, 2048) for b in (1, 4) for h, a in ((2048, 16), (6144, 64)) for t in (1, 2, 8)]


@pytest.mark.parametrize(
    ("row", "sequence_parallel", "policy"),
    [
        ("no parallelism", False, "none"),
        ("tensor parallel (baseline)", False, "none"),
        ("tensor + sequence parallel", True, "none"),
        ("tensor parallel + selective recompute", False, "selective"),
        ("tensor + sequence parallel + selective recompute", True, "selective"),
        ("full recompute", False, "full"),
    ],
)
def test_published_bytes_of_a_layer(row, sequence_parallel, policy):
    (formula,) = (entry["bytes_per_layer"] for entry in FORMULAE["table2"] if entry["config"] == row)
    for s, b, h, a, t in SHAPES:
        if row == "no parallelism" and t > 1:
            continue
        micro = Microbatch(paper_model(h, a), b, s, t, 0, sequence_parallel, attention="unfused", dropout_mask="stored")
        exact = {symbol: Fraction(value) for symbol, value in zip("sbhat", (s, b, h, a, t), strict=True)}
        assert counted(layer_activations(micro, policy)) == eval(formula, exact)  # noqa: S307 (this repository's file)


def paper_settings(s, b, h, a, t, L, p, v, name="1f1b", chunks=None, microbatches=None, **changes):
    schedule = build_schedule(name, p, microbatches or 4 * p, chunks) if p > 1 else None
    stages = schedule.num_stages if schedule else 1
    return MemorySettings(
        paper_model(h, a, L, v, s),
        s,
        b,
        tensor=t,
        schedule=schedule,
        layers_per_stage=(L // stages,) * stages,
        sequence_parallel=True,
        precision="bf16",
        attention="unfused",
        dropout_mask="stored",
        **changes,
    )


@pytest.mark.parametrize(("p", "v"), [(1, 51200), (2, 51200), (4, 32000), (8, 51200)])
@pytest.mark.parametrize(("s", "b", "h", "a", "t", "L"), [(2048, 4, 6144, 64, 8, 48), (1024, 1, 2048, 16, 2, 24)])
def test_published_bytes_of_the_first_stage(s, b, h, a, t, L, p, v):
    """total_first_stage and extra: layers, the embedding's mask for each microbatch in flight, the output layer."""
    found = activation_bytes(paper_settings(s, b, h, a, t, L, p, v), 0, 0, NOT_IN_THE_PAPER)
    layers = s * b * h * L / t * (34 + 5 * a * s / h)
    extra = s * b * h * L / t * (p / L + (p == 1) * 4 / L * (1 + v / h))
    assert found == pytest.approx(layers + extra, rel=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 3), (8, 2)])
def test_published_factor_of_interleaving(p, m):
    s, b, h, a, t, L = 1024, 1, 2048, 16, 2, 48
    settings = paper_settings(s, b, h, a, t, L, p, 51200, "interleaved_1f1b", m)
    found = activation_bytes(settings, 0, 0, NOT_IN_THE_PAPER | {"embedding dropout mask"})
    layers = s * b * h * L / t * (34 + 5 * a * s / h)
    assert found == pytest.approx(layers * (1 + (p - 1) / (p * m)), rel=1e-12)


def test_published_bytes_of_full_recomputation():
    s, b, h, a, L = 2048, 2, 4096, 32, 16
    settings = replace(paper_settings(s, b, h, a, 1, L, 4, 51200), recompute=RecomputeConfig("full"))
    assert activation_bytes(settings, 0, 0, NOT_IN_THE_PAPER | {"embedding dropout mask"}) == 2 * s * b * h * L


# ---------------------------------------------------------------- what autograd keeps
def shape(family, dropout=0.0, attention_dropout=0.0, **changes):
    return replace(
        FAMILIES[family],
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        num_key_value_heads=None if family == "gpt2" else 2,
        ffn_hidden_size=160,
        dropout=dropout,
        attention_dropout=attention_dropout,
        **changes,
    )


def kept_bytes(config, recompute, dtype, batch, length, grid=None, sequence_parallel=False):
    """Bytes of the distinct storages, parameters excepted, that a forward pass saves, with the loss."""
    model = GPT(config, grid, seed=0, recompute=recompute, dtype=dtype, sequence_parallel=sequence_parallel)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor: no address is used twice
        return tensor

    tokens = torch.arange(batch * length).view(batch, length) % config.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens, SampleContext(torch.arange(batch)))
    return sum(size for size, _ in found.values())


@pytest.mark.sample(16)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [("none",), ("selective",), ("full",), ("full", 1)], ids=str)
@pytest.mark.parametrize("dropout", [(0.0, 0.0), (0.1, 0.0), (0.1, 0.1)], ids=str)
def test_kept_bytes_are_those_of_saved_tensors(family, recompute, dropout):
    config, options = shape(family, *dropout), RecomputeConfig(*recompute)
    for dtype in PRECISIONS.values():
        micro = Microbatch(config, 2, 48, itemsize=dtype.itemsize)
        predicted = sum(stage_activations(micro, layer_policies(options, 3), True, True).values())
        assert predicted == pytest.approx(kept_bytes(config, options, dtype, 2, 48), rel=0.05)


def kept_on_a_rank(cases):
    found = []
    with Grid.create(tensor=2) as grid:
        for config, mode, dtype, sequence_parallel in cases:
            kept = kept_bytes(config, RecomputeConfig(mode), dtype, 2, 48, grid, sequence_parallel)
            micro = Microbatch(config, 2, 48, 2, grid.tensor.rank, sequence_parallel, dtype.itemsize)
            policies = layer_policies(RecomputeConfig(mode), 3)
            found.append((kept, sum(stage_activations(micro, policies, True, True).values())))
    return found


def test_kept_bytes_over_two_tensor_ranks():
    """Each family, mode, precision, with sequence parallelism and without; and heads that do not divide."""
    cases = [
        (shape(family, 0.1 * (number // 3 % 2), 0.1 * (number // 3 % 2)), mode, dtype, number // 2 % 2 == 0)
        for number, (family, mode, dtype) in enumerate(
            itertools.product(FAMILIES, ("none", "selective", "full"), (torch.float32, torch.bfloat16))
        )
    ]
    odd = replace(shape("llama"), num_attention_heads=6, num_key_value_heads=2, head_dim=8, vocab_size=99)
    cases.append((odd, "none", torch.float32, False))
    cases.append((replace(odd, num_attention_heads=3, num_key_value_heads=1), "none", torch.float64, True))
    for rows in run_ranks(kept_on_a_rank, 2, cases):
        for case, (kept, predicted) in zip(cases, rows, strict=True):
            assert predicted == pytest.approx(kept, rel=0.05), case


def live_storages():
    gc.collect()
    # Not the generator's 5 KB that a checkpoint remembers: of any size of layer.
    tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor and item.dtype != torch.uint8]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def selectively_kept_on_a_rank(cases):
    """Kept results lie in the checkpoint, where no hook sees them: counted among all tensors that are there."""
    found = []
    with Grid.create(tensor=2) as grid:
        for config, operations, sequence_parallel in cases:
            options = RecomputeConfig("selective", operations=operations)
            model = GPT(config, grid, seed=0, recompute=options, sequence_parallel=sequence_parallel)
            tokens = torch.arange(96).view(2, 48) % config.vocab_size
            saved = {}

            def pack(tensor, saved=saved):
                saved[tensor.untyped_storage().data_ptr()] = tensor
                return tensor

            before = live_storages().keys() | {p.untyped_storage().data_ptr() for p in model.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                losses = model(tokens, tokens, SampleContext(torch.arange(2)))
            kept = live_storages() | {address: t.untyped_storage().nbytes() for address, t in saved.items()}
            micro = Microbatch(config, 2, 48, 2, grid.tensor.rank, sequence_parallel, 4)
            predicted = stage_activations(micro, ("operations",) * 3, True, True, operations)
            found.append((sum(kept[a] for a in kept.keys() - before), sum(predicted.values())))
            losses.sum().backward()
    return found


@pytest.mark.slow
def test_selectively_kept_bytes_over_two_tensor_ranks():
    """A product whose sum is kept is let go."""
    cases = [
        (shape(family, rate, rate), operations, sequence_parallel)
        for (family, rate), operations, sequence_parallel in itertools.product(
            (("llama", 0.0), ("gpt2", 0.1), ("neox", 0.1)), ([], ["reduction"]), (False, True)
        )
    ]
    for rows in run_ranks(selectively_kept_on_a_rank, 2, cases):
        for case, (kept, predicted) in zip(cases, rows, strict=True):
            assert predicted == pytest.approx(kept, rel=0.05), case[1:]


# ---------------------------------------------------------------- what a step takes
def tracked_peak(config, recompute, dtype, batch, length, microbatches, kernels=None):
    model = GPT(config, seed=0, recompute=recompute, dtype=dtype, kernels=kernels)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(batch, length, dtype=torch.int64)

    def step(tracker=None):
        for _ in range(microbatches):
            if tracker is not None:
                tracker.reset_mod_stats()
            model(tokens, tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # states are made in the first step
    tracker = MemTracker()
    tracker.track_external(model, optimizer, tokens)
    with tracker:
        step(tracker)
    return sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("llama", "none"),
        ("gpt2", "selective"),
        ("llama", "full"),
        ("gpt2", "operations"),
        *(
            pytest.param(family, mode, marks=pytest.mark.slow)
            for family, mode in (
                *(("gpt2", "none"), ("llama", "selective"), ("gpt2", "full"), ("llama", "operations")),
                *(("neox", "none"), ("neox", "selective"), ("neox", "full"), ("neox", "operations")),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    ("hidden", "ffn", "vocabulary", "length", "batch", "layers", "dropout", "microbatches"),
    [
        (64, 160, 101, 64, 8, 4, 0.0, 1),  # the MLP weighs most
        (64, 160, 2000, 64, 4, 2, 0.0, 2),  # the loss
        (128, 512, 101, 16, 1, 4, 0.0, 1),  # the states
        (64, 64, 101, 128, 2, 2, 0.1, 1),  # the attention
    ],
)
def test_peak_is_that_of_the_tracker(
    family, mode, hidden, ffn, vocabulary, length, batch, layers, dropout, microbatches
):
    config = replace(
        shape(family, dropout, dropout),
        num_layers=layers,
        hidden_size=hidden,
        head_dim=hidden // 4,
        ffn_hidden_size=ffn,
        vocab_size=vocabulary,
        max_position_embeddings=128,
    )
    listed = RecomputeConfig("selective", operations=["attention"])
    options = listed if mode == "operations" else RecomputeConfig(mode)
    settings = MemorySettings(config, length, batch, microbatches, recompute=options)
    measured = tracked_peak(config, options, torch.float32, batch, length, microbatches)
    assert rank_memory(settings).peak == pytest.approx(measured, rel=0.05)


def test_peak_without_logits_is_that_of_the_tracker():
    """Two chunks; whole, the logits and their gradient would be a third of all."""
    config = replace(shape("llama"), num_layers=2, vocab_size=65536, max_position_embeddings=128)
    settings = MemorySettings(config, 128, 4, chunked_loss=True)
    measured = tracked_peak(config, RecomputeConfig(), torch.float32, 4, 128, 1, KernelsConfig(chunked_loss=True))
    assert rank_memory(settings).peak == pytest.approx(measured, rel=0.05)
    assert rank_memory(replace(settings, chunked_loss=False)).peak > 1.4 * measured


# ---------------------------------------------------------------- states
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", [None, ("1f1b", 2), ("zb_v", 2), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("tensor", [1, 2, 3])
def test_parameters_of_every_rank(family, schedule, tensor):
    """Uneven heads, columns and rows; key/value heads and tied embeddings that two ranks hold."""
    config = replace(FAMILIES[family], num_layers=5)
    plan = build_schedule(schedule[0], schedule[1], 4) if schedule else None
    ranks = plan.ranks if plan else 1
    settings = MemorySettings(config, 32, tensor=tensor, schedule=plan)
    for rank in range(ranks * tensor):
        grid = Grid.layout(world_size=ranks * tensor, rank=rank, tensor=tensor, pipeline=ranks)
        placement = plan.placement if plan else None
        model = GPT(config, grid, placement=placement, sequence_length=32, device="meta")
        count = rank_parameters(settings, grid.pipeline.rank, grid.tensor.rank)
        assert count.total == sum(parameter.numel() for parameter in model.parameters())
        hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]
        assert count.matrices == sum(parameter.numel() for parameter in hidden)


@pytest.mark.parametrize(
    ("precision", "optimizer", "zero", "per_parameter"),
    [
        # weights + main weights + gradients that stay + states, over 4 data ranks
        ("fp32", "adamw", 0, 4 + 4 + 8),
        ("bf16", "adamw", 0, 2 + 4 + 4 + 8),
        ("bf16", "adamw", 1, 2 + 4 + (4 + 8) / 4),
        ("fp16", "adamw", 2, 2 + (4 + 4 + 8) / 4),
        ("bf16", "adamw", 3, (4 + 8) / 4),
        ("fp64", "sgd", 0, 8 + 8),
        ("fp64", "sgd", 2, 8 + 8 / 4),
        ("fp32", "adamw", 3, (4 + 8) / 4),
    ],
)
def test_bytes_a_parameter_between_steps(precision, optimizer, zero, per_parameter):
    config = replace(FAMILIES["llama"], hidden_size=256)
    settings = MemorySettings(config, 32, data=4, zero=zero, precision=precision, optimizer=optimizer)
    memory = rank_memory(settings)
    assert memory.between_steps == pytest.approx(rank_parameters(settings).total * per_parameter, rel=1e-5)
    hybrid = rank_memory(replace(settings, data=8, shard_size=4))
    assert hybrid.between_steps == memory.between_steps


def test_one_plain_process_has_no_gradients_between_steps():
    memory = rank_memory(MemorySettings(FAMILIES["llama"], 32))
    assert memory.between_steps == memory.weights + memory.optimizer and memory.gradients == memory.weights


def test_momentum_of_sgd_is_one_number():
    settings = MemorySettings(FAMILIES["llama"], 32, optimizer="sgd", momentum=0.9)
    assert rank_memory(settings).optimizer == 4 * rank_parameters(settings).total


def test_zero_lowers_the_peak_stage_by_stage():
    config = replace(FAMILIES["llama"], num_layers=24, hidden_size=512, ffn_hidden_size=1408, vocab_size=4000)
    settings = MemorySettings(config, 256, data=8, precision="bf16", bucket_bytes=2**20, microbatches=8)
    peaks = [rank_memory(replace(settings, zero=zero)).peak for zero in range(4)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4


def test_what_travels_by_stage_of_zero_schedule_and_reduction():
    settings = MemorySettings(LLAMA, 24, microbatches=4, data=4, zero=3, precision="bf16", bucket_bytes=64)
    count = rank_parameters(settings)
    layerwise = travelling_bytes(settings, count)
    once = travelling_bytes(replace(settings, reduce="last"), count)
    assert once == layerwise // 2 + 4 * count.total, "gradients of all microbatches add up whole"
    split = replace(settings, schedule=build_schedule("zb_h1", 2, 4))
    held = rank_parameters(split)
    assert travelling_bytes(split, held) == (2 + 4) * held.total, "all is gathered, and all gradients wait"
    assert travelling_bytes(replace(settings, zero=2), count) == 128
    assert travelling_bytes(replace(settings, zero=2, reduce="last"), count) == 4 * count.total
    assert travelling_bytes(replace(settings, data=1), count) == 0, "no rank to share with"


def test_each_microbatch_at_the_first_stages_of_zero_keeps_both():
    settings = MemorySettings(LLAMA, 24, microbatches=4, data=4)
    count = rank_parameters(settings).total
    assert rank_memory(settings).gradients == 4 * count
    assert rank_memory(replace(settings, reduce="each")).gradients == 8 * count
    assert rank_memory(replace(settings, zero=1, reduce="each")).gradients == 5 * count
    assert rank_memory(replace(settings, zero=3, data=1)) == rank_memory(replace(settings, zero=0, data=1))
