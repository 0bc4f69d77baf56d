"""The decoder against formulas written out plainly, its names, its counts, its refusals."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from parity import FAMILIES, GPT2, LLAMA

from gridtron.models import GPT, GPTConfig
from gridtron.models.heads import HeadSplit
from gridtron.parallel import full_state_dict, load_full_state_dict
from gridtron.parallel.parameters import named_parameters


def reference(config, state, tokens):
    """(batch, sequence) -> logits, batch-first, no fused anything."""
    width, heads, kv = config.head_size, config.num_attention_heads, config.kv_heads
    get = lambda name: state.get(name)  # noqa: E731
    x = state["embedding.weight"][tokens]
    length = tokens.shape[1]
    if config.position == "learned":
        x = x + state["positions.weight"][:length]

    def norm(x, name):
        if config.normalization == "layer_norm":
            return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], get(f"{name}.bias"), config.norm_eps)
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * state[f"{name}.weight"]

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], get(f"{name}.bias"))

    def turn(x):
        first = int(width * config.rotary_fraction)
        angles = torch.outer(
            torch.arange(length).double(), config.rope_theta ** (-torch.arange(0, first, 2).double() / first)
        )
        pairs = torch.complex(x[..., : first // 2], x[..., first // 2 : first])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, x[..., first:]], -1)

    future = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
    for layer in range(config.num_layers):
        at = f"blocks.{layer}"
        h = norm(x, f"{at}.attention_norm")
        q, k, v = (
            linear(h, f"{at}.attention.{name}").unflatten(-1, (-1, width)).transpose(1, 2) for name in ("q", "k", "v")
        )
        if config.position == "rotary":
            q, k = turn(q), turn(k)
        k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
        weights = (q @ k.transpose(-1, -2) / width**0.5 + future).softmax(-1)
        before = x
        x = x + linear((weights @ v).transpose(1, 2).flatten(-2), f"{at}.attention.out")
        h = norm(before if config.parallel_residual else x, f"{at}.mlp_norm")
        up = linear(h, f"{at}.mlp.up")
        act = (
            F.silu(linear(h, f"{at}.mlp.gate")) * up
            if config.activation == "swiglu"
            else F.gelu(up, approximate="tanh" if config.activation == "gelu_tanh" else "none")
        )
        x = x + linear(act, f"{at}.mlp.down")
    head = state["embedding.weight"] if config.tie_embeddings else state["head.weight"]
    return norm(x, "final_norm") @ head.t()


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_formulas(family):
    config = FAMILIES[family]
    model = GPT(config, seed=3, dtype=torch.float64)
    state = full_state_dict(model)
    for name, tensor in state.items():
        if tensor.ndim == 1:
            state[name] = torch.randn_like(tensor)
    load_full_state_dict(model, state)
    state = {name: tensor.requires_grad_() for name, tensor in state.items()}
    tokens, targets = torch.randint(0, 101, (2, 3, 17))
    expected = reference(config, state, tokens)
    assert torch.allclose(model(tokens), expected, rtol=1e-11, atol=1e-11)
    losses = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    assert torch.allclose(model(tokens, targets), losses, rtol=1e-11, atol=1e-11)
    losses.sum().backward()
    model(tokens, targets).sum().backward()
    for name, gradient in full_state_dict(model, of="gradients").items():
        assert torch.allclose(gradient, state[name].grad, rtol=1e-9, atol=1e-9), name


def test_names_and_order():
    names = list(full_state_dict(GPT(replace(LLAMA, num_layers=1), seed=0)))
    layer = ["attention_norm", *(f"attention.{name}" for name in ("q", "k", "v", "out")), "mlp_norm", "mlp.gate"]
    layer += ["mlp.up", "mlp.down"]
    blocks = [f"blocks.0.{name}.weight" for name in layer]
    assert names == ["embedding.weight", *blocks, "final_norm.weight", "head.weight"]
    assert "head.weight" not in full_state_dict(GPT(GPT2, seed=0))


def test_stages_share_names_and_sum_to_the_whole():
    whole = GPT(replace(LLAMA, num_layers=5), seed=1, dtype=torch.float64)
    parts = [
        GPT(replace(LLAMA, num_layers=5), seed=1, stages=[stage], num_stages=3, dtype=torch.float64)
        for stage in range(3)
    ]
    state = {}
    for stage, part in enumerate(parts):
        assert list(part.stages) == [stage]
        assert {name for name, _ in part.stages[stage].named_parameters()} == {
            name for name, _ in part.named_parameters()
        }
        own = full_state_dict(part)
        assert not state.keys() & own.keys(), "every layer is owned once"
        state |= own
    expected = full_state_dict(whole)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    tokens = torch.randint(0, 101, (2, 9))
    x = tokens
    for stage, part in enumerate(parts):
        with pytest.raises(ValueError, match=rf"holds stage {stage} of 3 .*PipelineRunner\(model.stages"):
            part(tokens)
        x = part.stages[stage](x)
    assert torch.equal(x, whole(tokens))


def test_initial_weights_follow_the_seed():
    torch.manual_seed(5)
    first = full_state_dict(GPT(LLAMA))
    torch.manual_seed(5)
    second, third = full_state_dict(GPT(LLAMA)), full_state_dict(GPT(LLAMA))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], third["head.weight"])
    wide = full_state_dict(GPT(replace(LLAMA, init_std=0.02, hidden_size=512, head_dim=64), seed=0))
    assert abs(wide["blocks.0.attention.q.weight"].std() / 0.02 - 1) < 0.02
    assert abs(wide["blocks.0.attention.out.weight"].std() / (0.02 / 2) - 1) < 0.02
    assert torch.equal(wide["final_norm.weight"], torch.ones(512))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "num_key_value_heads=2"),
        ({"num_attention_heads": 3, "head_dim": None, "num_key_value_heads": 3}, "hidden_size=15 or 18"),
        ({"head_dim": 5}, "odd"),
        ({"vocab_size": None}, "vocab_size is not set"),
        ({"rope_scaling": {"type": "magic"}}, "'magic' is not known"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor=x must be a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "above 0"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "factr": 2}}, "has no factr; nearest: factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1}}, "has no mscale; leave it out"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "position": "learned"}, "no effect with position=learned"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "head_dim above 2"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "at least 1"),
        ({"rotary_fraction": 0.3}, "is 1 entries, and rotary positions turn pairs; nearest: rotary_fraction=0.5"),
        ({"rotary_fraction": 0.5, "position": "learned"}, "no effect with position=learned"),
        ({"rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": -64}}, "above 0"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 1,
                    "original_max_position_embeddings": 64,
                }
            },
            "must be under",
        ),
    ],
)
def test_shapes_that_cannot_be(changes, words):
    with pytest.raises(ValueError, match=words):
        GPT(replace(LLAMA, **changes))


def test_sequences_that_cannot_be():
    model = GPT(replace(GPT2, max_position_embeddings=8), seed=0)
    with pytest.raises(ValueError, match="longer than the 8 learned positions"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="outside the vocabulary of 101"):
        model(torch.full((1, 4), 101))


@pytest.mark.case(19)
def test_more_ranks_than_heads_are_refused_by_name():
    from gridtron.core import Grid

    with pytest.raises(ValueError, match=r"tensor=9 ranks for num_attention_heads=8.*at most 8"):
        GPT(LLAMA, Grid.layout(world_size=9, tensor=9), device="meta")
    assert HeadSplit.over(8, 2, 3).key_value == (((0, 1),), ((0, 2),), ((1, 2),))


def test_every_rank_of_a_large_job_on_meta():
    """Layout needs no processes: the shares of all ranks add up to the whole."""
    from gridtron.core import Grid
    from gridtron.models.cost.parameters import total_parameters

    config = GPTConfig(
        num_layers=2, hidden_size=896, num_attention_heads=14, num_key_value_heads=2, ffn_hidden_size=4864,
        vocab_size=151936, tie_embeddings=True, qkv_bias=True,
    )  # fmt: skip
    owned = 0
    for rank in range(4):
        grid = Grid.layout(world_size=4, rank=rank, tensor=4)
        model = GPT(config, grid, device="meta")
        for item in named_parameters(model, grid.tensor):
            rows = sum(stop - start for start, stop in item.sharding.owned(rank))
            length = item.sharding.shape[item.sharding.dim or 0]
            total = torch.Size(item.sharding.shape).numel()
            owned += total * rows // length
    assert owned == total_parameters(config)


# ---------------------------------------------------------------- stages
PLACEMENTS = {
    "one": lambda ranks, chunks: None,
    "loop": lambda ranks, chunks: [stage % ranks for stage in range(ranks * chunks)],
    "v": lambda ranks, chunks: [*range(ranks), *reversed(range(ranks))],
}


def parts_of(config, ranks, **arguments):
    from gridtron.core import Grid

    grids = [Grid.layout(world_size=ranks, rank=rank, pipeline=ranks) for rank in range(ranks)]
    return [GPT(config, grid, seed=4, **arguments) for grid in grids]


@pytest.mark.case(27)
@pytest.mark.parametrize(("layers", "ranks", "chunks"), [
    (7, 2, 1), (5, 2, 2), (30, 4, 1), (30, 4, 3), (7, 7, 1), (11, 3, 3), (9, 4, 2), (8, 1, 3),
])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_owned_once(layers, ranks, chunks, family):
    config = replace(FAMILIES[family], num_layers=layers)
    dense = GPT(config, device="meta")
    for kind in ("one", "loop", "v") if chunks == 2 else ("one", "loop"):
        placement = PLACEMENTS[kind](ranks, chunks)
        models = parts_of(config, ranks, device="meta", num_stages=ranks * chunks, placement=placement)
        assert sorted(stage for model in models for stage in model.stages) == list(range(ranks * chunks))
        owned = [layer for model in models for stage in model.stages.values() for layer in map(int, stage.blocks)]
        assert sorted(owned) == list(range(layers))
        items = [item for model in models for item in named_parameters(model)]
        assert sum(item.parameter.numel() for item in items if item.stands_for_all) == sum(
            parameter.numel() for parameter in dense.parameters()
        )
        apart = config.tie_embeddings and ranks > 1 and kind != "v"
        assert [item.name for item in items if not item.stands_for_all] == ["embedding.weight"] * apart


@pytest.mark.sample(10)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ranks", "arguments", "ends"), [
    (3, {}, (0, 2)),
    (2, {"num_stages": 4}, (0, 1)),
    (2, {"placement": [0, 1, 1, 0]}, (0,)),
    (2, {"layers_per_stage": [1, 4]}, (0, 1)),
    (3, {"placement": [2, 0, 1]}, (1, 2)),
])  # fmt: skip
def test_stages_compute_what_one_process_does(family, ranks, arguments, ends):
    """``ends``: the ranks that hold the embedding where it is tied."""
    config = replace(FAMILIES[family], num_layers=5)
    whole = GPT(config, seed=4, dtype=torch.float64)
    expected = full_state_dict(whole)
    models = parts_of(config, ranks, dtype=torch.float64, **arguments)
    names = set()
    for rank, model in enumerate(models):
        for item in named_parameters(model):
            assert torch.equal(item.parameter, expected[item.name]), item.name
            names.add(item.name)
            if item.copies is not None:
                assert item.name == "embedding.weight" and item.copies.ranks == ends and rank in ends
        if config.tie_embeddings:
            assert hasattr(model, "embedding") == (rank in ends)
            assert rank not in ends or hasattr(model.embedding, "copies") == (len(ends) > 1)
    assert names == expected.keys()
    stages = {number: stage for model in models for number, stage in model.stages.items()}
    x = tokens = torch.randint(0, 101, (2, 9))
    for number in range(len(stages)):
        x = stages[number](x)
    assert torch.equal(x, whole(tokens))


def test_layers_are_balanced_by_cost():
    """A vocabulary that weighs as two layers leaves the last stage two layers fewer."""
    config = GPTConfig(num_layers=14, hidden_size=64, num_attention_heads=4, vocab_size=2048 + 512)
    one = GPT(config, num_stages=4, device="meta", sequence_length=64)
    counts = [stop - start for start, stop in one.layer_ranges]
    assert counts[-1] < counts[0] == max(counts) and sum(counts) == 14
    assert [stop - start for start, stop in GPT(config, num_stages=2, layers_per_stage=[3, 11]).layer_ranges] == [3, 11]


@pytest.mark.parametrize(
    ("ranks", "arguments", "words"),
    [
        (3, {}, "num_stages=3 for num_layers=2.*nearest: num_stages=2"),
        (2, {"num_stages": 3, "stages": [3]}, r"stages=\[3\] must be one or more of 0 to 2"),
        (2, {"stages": []}, "must be one or more of 0 to 1"),
        (2, {"stages": [0, 0]}, "each once"),
        (2, {"layers_per_stage": [1]}, r"layers_per_stage=\[1\] has 1 counts and there are 2 stages"),
        (2, {"layers_per_stage": [2, 0]}, "raise the 0"),
        (2, {"layers_per_stage": [1, 3]}, r"is 4 layers in sum and num_layers=2; nearest: \[1,1\]"),
        (2, {"placement": [0, 0]}, "must name each of the 2 ranks"),
        (2, {"placement": [0, 1, 2]}, "must name each of the 2 ranks"),
        (2, {"placement": [0, 1], "num_stages": 3}, "is of 2 stages and num_stages=3"),
        (2, {"num_stages": 4, "stages": [0, 3]}, r"on pipeline rank 0, where placement=\[0, 1, 0, 1\] puts \[0, 2\]"),
        (2, {"num_stages": 5}, "num_stages=5 does not divide over pipeline=2; nearest: num_stages=4 or 6"),
    ],
)
def test_splits_that_cannot_be(ranks, arguments, words):
    with pytest.raises(ValueError, match=words):
        parts_of(LLAMA, ranks, device="meta", **arguments)
