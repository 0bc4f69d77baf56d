"""checkpoint.init_from at composition: the model that follows from the weights, and what is refused before a start."""

import json
from dataclasses import replace

import parity
import pytest
import torch

from gridtron.conf.compose import compose
from gridtron.conf.refusal import Refusal
from gridtron.conf.rules import Surroundings
from gridtron.conf.schema import Plan, plan_to_dict
from gridtron.conf.warm_start import find_source, source_violations
from gridtron.core.checkpoint.config import CheckpointConfig
from gridtron.core.checkpoint.layout import step_path
from gridtron.core.checkpoint.whole import write_checkpoint
from gridtron.models import GPT
from gridtron.models.huggingface import config_from_huggingface, save_huggingface
from gridtron.parallel import full_state_dict

SHAPE = {"num_attention_heads": 4, "head_dim": None, "ffn_hidden_size": 24, "vocab_size": 300}
LLAMA, GPT2 = replace(parity.LLAMA, rope_theta=5e5, **SHAPE), replace(parity.GPT2, **SHAPE)
SURROUNDINGS = Surroundings(cores=8, data_fault=lambda config: None, folder_fault=lambda folder: None)
WINDOWED = {
    "model_type": "mistral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 32,
}  # fmt: skip
SHORT = ("train.sequence_length=32",)


def state_of(config):
    return full_state_dict(GPT(config, seed=1))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders by kind: of Hugging Face's, of a checkpoint, of a checkpoint of a model of its user's own."""
    path = tmp_path_factory.mktemp("sources")
    for name, config in (("llama", LLAMA), ("gpt2", GPT2)):
        save_huggingface(path / name, config, state_of(config).__getitem__, torch.float32)
    for name, model in (
        ("run", plan_to_dict(Plan(model=LLAMA))["model"]),
        ("own", plan_to_dict(Plan(model=replace(LLAMA, build="mine:build")))["model"]),
        ("silent", None),
    ):
        state = {f"parameters/{key}": tensor for key, tensor in state_of(LLAMA).items()}
        extra = {} if model is None else {"plan": {"model": model}}
        entries = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in state.items()}
        write_checkpoint(step_path(path / name / "checkpoints", 3), entries, state.__getitem__, extra)
    return path


def plan_of(source, *overrides, stored=None):
    written = (f"checkpoint.init_from={source}", *SHORT, *overrides)
    return compose(written, stored=stored, surroundings=SURROUNDINGS)


def refused(source, *overrides):
    with pytest.raises(Refusal) as refusal:
        plan_of(source, *overrides)
    text = str(refusal.value)
    assert len(text.splitlines()) < 12
    return text


@pytest.mark.parametrize(("kind", "config"), [("llama", LLAMA), ("gpt2", GPT2), ("run", LLAMA)])
def test_the_model_comes_with_the_weights(sources, kind, config):
    plan = plan_of(sources / kind)
    assert plan.model.resolved() == config.resolved()
    assert "model" not in plan.choices  # not the file that config.yaml picks


def test_one_checkpoint_is_a_source_as_well_as_a_run(sources, monkeypatch):
    whole, one = (find_source(str(path)) for path in (sources / "run", step_path(sources / "run" / "checkpoints", 3)))
    assert whole == one and whole.kind == "checkpoint" and whole.path.name == "step-00000003"
    monkeypatch.chdir(sources)
    assert plan_of("run").checkpoint.init_from == str(sources / "run")  # a later start may be elsewhere


def test_what_changes_no_tensor_may_differ(sources):
    free = ("model.dropout=0.1", "model.attention_dropout=0.2", "model.init_std=0.5", "recompute=full")
    model = plan_of(sources / "llama", *free).model
    assert (model.dropout, model.attention_dropout, model.hidden_size) == (0.1, 0.2, 16)
    stretched = plan_of(sources / "llama", "model.max_position_embeddings=4096", "model.rope_theta=1e6").model
    assert stretched == replace(plan_of(sources / "llama").model, max_position_embeddings=4096, rope_theta=1e6)
    scaled = "model.rope_scaling={rope_type: linear, factor: 4}"
    assert plan_of(sources / "llama", scaled).model.rope_scaling == {"rope_type": "linear", "factor": 4}


@pytest.mark.parametrize(
    ("kind", "overrides", "words"),
    [
        ("llama", ["model.hidden_size=32"], "model.hidden_size=32 (16 there): the weights of checkpoint.init_from="),
        ("gpt2", ["model.max_position_embeddings=128"], "model.max_position_embeddings=128 (64 there)"),
        ("llama", ["model=small"], "the weights of checkpoint.init_from="),
        ("run", ["model.ffn_hidden_size=25"], "model.ffn_hidden_size=25 (24 there)"),
        ("llama", ["model.build=collections:OrderedDict"], "it holds a llama, and this run's model is your own"),
        ("own", [], "it holds a model of its user's own, and this run's model is this project's"),
        ("silent", [], "does not say which model it holds"),
        ("llama", ["checkpoint.resume=/"], "leave one out"),
        ("nowhere", [], "nowhere: no such folder"),
        (".", [], "neither Hugging Face's (no config.json)"),
        ("gpt2", ["train.sequence_length=65"], "learned positions end at model.max_position_embeddings=64"),
    ],
)
def test_what_changes_the_tensors_is_refused_by_name(sources, kind, overrides, words):
    assert words in refused(sources / kind, *overrides)


def test_all_that_differs_is_told_at_once(sources):
    wrong = {
        "num_layers": ("3", "2"),
        "bias": ("true", "false"),
        "vocab_size": ("310", "300"),
        "norm_eps": ("0.001", "1e-05"),
        "tie_embeddings": ("true", "false"),
        "num_key_value_heads": ("4", "2"),
        "mlp_bias": ("false", "false"),
    }
    text = refused(sources / "llama", *(f"model.{name}={asked}" for name, (asked, _) in wrong.items()))
    for name, (asked, there) in wrong.items():
        assert (f"model.{name}={asked} ({there} there)" in text) == (asked != there)
    assert text.endswith("leave the options out")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(sources, tmp_path):
    config = replace(LLAMA, vocab_size=101)
    save_huggingface(tmp_path / "small", config, state_of(config).__getitem__, torch.float32)
    assert "model.vocab_size=101: data.tokenizer=bytes has 256 ids" in refused(tmp_path / "small")


def test_weights_that_are_not_those_of_their_settings_are_told_before_any_start(sources, tmp_path):
    (tmp_path / "cut").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "cut" / name).write_bytes(
            (sources / "llama" / name).read_bytes()[: 4000 if name[0] == "m" else None]
        )
    assert "is not a whole safetensors file" in refused(tmp_path / "cut")
    state = state_of(LLAMA)
    state["parameters/blocks.0.mlp.wait.weight"] = state.pop("blocks.0.mlp.up.weight")
    state = {key if key.startswith("parameters/") else f"parameters/{key}": tensor for key, tensor in state.items()}
    entries = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in state.items()}
    extra = {"plan": {"model": plan_to_dict(Plan(model=LLAMA))["model"]}}
    write_checkpoint(step_path(tmp_path, 1), entries, state.__getitem__, extra)
    text = refused(step_path(tmp_path, 1))
    assert "missing blocks.0.mlp.up.weight" in text and "unexpected blocks.0.mlp.wait.weight" in text


def test_a_run_that_goes_on_needs_the_source_no_more(sources):
    """Its own config.yaml has the model; only without a checkpoint of its own is the source asked, then by name."""
    stored = plan_to_dict(plan_of(sources / "llama"))
    stored["checkpoint"]["init_from"] = "/gone"
    plan = compose((), stored=stored, surroundings=SURROUNDINGS)
    assert plan.model.resolved() == LLAMA.resolved()
    (violation,) = source_violations(plan)
    assert "/gone: no such folder" in violation.message
    assert not source_violations(replace(plan, checkpoint=CheckpointConfig(init_from=str(sources / "run"))))
    (violation,) = source_violations(replace(plan, checkpoint=CheckpointConfig(init_from=str(sources / "gpt2"))))
    assert "model.normalization=rms_norm (layer_norm there)" in violation.message


def test_an_experiment_picks_the_recipe_and_the_weights_the_model(sources, tmp_path):
    folder = tmp_path / "options" / "experiment"
    folder.mkdir(parents=True)
    lines = "# @package _global_\ndefaults:\n  - override /model: small\ntrain:\n  steps: 7\nmodel:\n  dropout: 0.3\n"
    (folder / "mine.yaml").write_text(lines)
    written = (f"checkpoint.init_from={sources / 'llama'}", *SHORT, "experiment=mine")
    plan = compose(written, [str(tmp_path / "options")], surroundings=SURROUNDINGS)
    assert plan.train.steps == 7 and plan.model.dropout == 0.3
    assert replace(plan.model, dropout=0.0).resolved() == LLAMA.resolved()


def test_a_window_is_the_longest_sequence(tmp_path):
    """Beyond it the weights would be those of another model: by either option it is refused."""
    config = config_from_huggingface(WINDOWED)
    save_huggingface(tmp_path / "model", config, state_of(config).__getitem__, torch.float32, "mistral")
    (tmp_path / "model" / "config.json").write_text(json.dumps(WINDOWED))
    source = f"checkpoint.init_from={tmp_path / 'model'}"
    assert compose([source, *SHORT], surroundings=SURROUNDINGS).model.max_position_embeddings == 32
    with pytest.raises(Refusal, match=r"train\.sequence_length=33: the longest sequence is"):
        compose([source, "train.sequence_length=33"], surroundings=SURROUNDINGS)
    with pytest.raises(Refusal, match="sees a window of 32, and longer sequences would make another model"):
        compose([source, "model.max_position_embeddings=64", *SHORT], surroundings=SURROUNDINGS)
