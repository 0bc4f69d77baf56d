"""Settings of Hugging Face's families without transformers: what is refused by name, and what cannot be written."""

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from parity import FAMILIES as SHAPES

from gridtron.conf.compose import compose
from gridtron.conf.files import PACKAGE
from gridtron.conf.rules import Surroundings
from gridtron.models import GPTConfig
from gridtron.models.huggingface import config_from_huggingface, config_to_huggingface, read_config
from gridtron.models.huggingface.families import FAMILIES
from gridtron.models.huggingface.settings import translate
from gridtron.models.rotary import rotary_frequencies

SURROUNDINGS = Surroundings(cores=8, data_fault=lambda config: None, folder_fault=lambda folder: None)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 128}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
GPT2 = {"model_type": "gpt2", "vocab_size": 101, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 64}
NEOX = {**LLAMA, "model_type": "gpt_neox", "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_pct": 0.5}
for _unneeded in ("num_key_value_heads", "rms_norm_eps"):
    NEOX.pop(_unneeded)


def yarn(**more):
    return {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **more}}


@pytest.mark.case(39)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "lama"}, "model_type='lama' is not known; nearest: llama; known: llama, mistral"),
        ({}, "model_type=None is not known"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act=gelu: not computed here; possible: silu, swish"),
        ({**LLAMA, "attention_bias": 1}, "attention_bias=1: should be true or false"),
        ({**LLAMA, "rope_interleaved": True}, "rope_interleaved=true: not computed here; possible: false"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: not computed here; possible: 1.0"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: a llama"),
        ({**LLAMA, "attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0: not known of llama; delete it from"),
        ({**LLAMA, "rope_thetas": 1.0}, "rope_thetas=1.0: not known of llama; nearest: rope_theta"),
        ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder=true: not known"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantised weights are not read"),
        ({**LLAMA, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "type 'longrope' is not known; known:"),
        ({**LLAMA, "rope_scaling": {"factor": 2.0}}, "rope_scaling.factor=2.0 without a rope_type"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "type linear needs factor"),
        ({**LLAMA, "rope_scaling": "linear"}, "rope_scaling='linear': should be an object"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({**LLAMA, "rope_theta": "big"}, "rope_theta='big': should be a number"),
        ({**LLAMA, **yarn(finetuned=True)}, "has no finetuned"),
        ({**LLAMA, **yarn(factor="four")}, "factor=four must be a number above 0"),
        ({**LLAMA, "hidden_size": "24"}, "hidden_size='24': should be a whole number from 1"),
        ({**LLAMA, "num_hidden_layers": -3}, "num_hidden_layers=-3: should be a whole number from 1"),
        ({**LLAMA, "rms_norm_eps": 0}, "rms_norm_eps=0: should be a number above 0"),
        ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings=1: should be true or false"),
        ({key: LLAMA[key] for key in LLAMA if key != "vocab_size"}, "vocab_size is missing"),
        ({**LLAMA, "num_key_value_heads": 4}, "num_attention_heads=6 is not a multiple of num_key_value_heads=4"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true: not computed here"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights=false: not computed here; possible: true"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention=true"),
        ({**GPT2, "embd_pdrop": 0.0}, "resid_pdrop=0.1, embd_pdrop=0.0: one dropout serves"),
        ({**NEOX, "attention_bias": False}, "attention_bias=false: not computed here; possible: true"),
        ({**NEOX, "rotary_pct": 0.1}, "rotary_fraction=0.1 of head_dim=4 is 0 entries"),
        ({**QWEN2, "use_mrope": True}, "use_mrope=true: not computed here"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(settings, words):
    with pytest.raises(ValueError) as fault:
        config_from_huggingface(settings)
    assert words in str(fault.value)
    assert len(str(fault.value).splitlines()) < 12


_ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2.5, 1e308, float("inf"), float("nan"), 10**30, "x", "", [], [1], {}, {"a": 1}),
    *({"rope_type": kind} for kind in ("yarn", "linear", "llama3", "dynamic", ["x"])),
    *({"rope_type": kind, "factor": factor} for kind in ("yarn", "linear") for factor in (0, -2, None, [], "x")),
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": True},
    {"rope_type": "yarn", "factor": 2, "mscale": -1, "mscale_all_dim": 1},
    {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 0},
    *({"rope_theta": theta} for theta in ({}, 0, -1.0)),
)


@pytest.mark.parametrize("settings", [LLAMA, MISTRAL, QWEN2, GPT2, NEOX], ids=lambda value: value["model_type"])
def test_any_value_of_any_key_is_understood_or_refused(settings):
    """No other failure than the refusal; and what is understood can be written and has angles."""
    understood = 0
    for key in {*settings, *FAMILIES[settings["model_type"]].keys(), "unheard_of"}:
        for value in _ODD:
            try:
                config = config_from_huggingface({**settings, key: value})
            except ValueError:
                continue
            understood += 1
            config_to_huggingface(config, settings["model_type"])
            if config.position == "rotary":
                assert rotary_frequencies(config, 16)[0].isfinite().all(), (key, value)
    assert understood > 30


def test_everything_wrong_is_told_at_once():
    wrong = {
        **LLAMA,
        "hidden_act": "relu",
        "hidden_size": 0,
        "logit_scale": 2.0,
        "rope_theta": None,
        "vocab_size": None,
    }
    with pytest.raises(ValueError) as fault:
        config_from_huggingface(wrong)
    for words in ("hidden_act", "hidden_size=0", "logit_scale=2.0", "vocab_size=null"):
        assert words in str(fault.value)
    many = {**LLAMA, **{f"unheard_of_{number}": number for number in range(40)}}
    with pytest.raises(ValueError, match="and 30 more"):
        config_from_huggingface(many)


def test_what_a_terminal_would_obey_is_not_printed():
    strange = {"\x1b[2J" + "x" * 10**5: "\n" * 50, "model_type": "llama\x07"}
    for settings in ({**LLAMA, **strange, "model_type": "llama"}, {**LLAMA, **strange}):
        with pytest.raises(ValueError) as fault:
            config_from_huggingface(settings)
        assert all(line.isprintable() and len(line) < 400 for line in str(fault.value).splitlines())


def test_keys_that_do_not_matter_are_passed_over():
    more = {
        "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 1,
        "eos_token_id": [2, 3], "transformers_version": "4.40.0", "pretraining_tp": 1, "_name_or_path": "x/y",
        "is_llama_config": True, "rope_interleaved": False, "head_dim": None, "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"}, "sliding_window_of_nobody": None,
    }  # fmt: skip
    assert config_from_huggingface({**LLAMA, **more}) == config_from_huggingface(LLAMA)


@pytest.mark.case(39)
def test_rotary_settings_of_every_age_say_the_same():
    newer = {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}}
    for older in ({"rope_type": "linear"}, {"type": "linear"}):
        read = config_from_huggingface({**LLAMA, "rope_theta": 5e5, "rope_scaling": {**older, "factor": 8.0}})
        assert read == config_from_huggingface(newer)
        assert (read.rope_theta, read.rope_scaling) == (5e5, {"rope_type": "linear", "factor": 8.0})
    parameters = {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5}
    modern = {key: value for key, value in NEOX.items() if key != "rotary_pct"} | {"rope_parameters": parameters}
    assert config_from_huggingface(modern) == config_from_huggingface({**NEOX, "rotary_emb_base": 50000.0})


@pytest.mark.case(39)
def test_what_a_scaling_leaves_open_is_written_out():
    """Read alone, yarn's trained length is max_position_embeddings: it must not follow that when it is changed."""
    assert config_from_huggingface({**LLAMA, **yarn()}).rope_scaling["original_max_position_embeddings"] == 512
    outside = config_from_huggingface({**LLAMA, **yarn(), "original_max_position_embeddings": 128})
    assert outside.rope_scaling["original_max_position_embeddings"] == 128
    without = {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 128}}
    assert config_from_huggingface({**LLAMA, **without}).rope_scaling["factor"] == 4.0
    pair = config_from_huggingface({**LLAMA, **yarn(mscale=1.0, mscale_all_dim=1.0)})
    assert pair.rope_scaling["attention_factor"] == 1.0


def test_a_sliding_window_shortens_what_can_be_computed():
    translation = translate(MISTRAL)
    assert translation.config.max_position_embeddings == 128
    assert "sliding_window=128" in translation.notes[0] and "512" in translation.notes[0]
    assert translate({**MISTRAL, "sliding_window": None}).config.max_position_embeddings == 512
    longer = translate({**MISTRAL, "sliding_window": 4096})
    assert longer.config.max_position_embeddings == 512 and not longer.notes
    # transformers' own where the key is absent
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert translate({**absent, "max_position_embeddings": 32768}).config.max_position_embeddings == 4096
    used = {**QWEN2, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert translate(used).config.max_position_embeddings == 64
    for unused in ({"max_window_layers": 3}, {"use_sliding_window": False}, {"layer_types": ["full_attention"] * 3}):
        assert translate({**used, **unused}).config.max_position_embeddings == 512
    both = ["full_attention", "sliding_attention", "full_attention"]
    assert translate({**used, "use_sliding_window": False, "layer_types": both}).config.max_position_embeddings == 64


# ---------------------------------------------------------------- writing
def test_the_family_follows_from_the_shape():
    for name, family in (("llama", "llama"), ("gpt2", "gpt2"), ("qwen", "qwen2"), ("neox", "gpt_neox")):
        # Of GPT-2 and GPT-NeoX, heads are as wide as hidden_size has it.
        shape = SHAPES[name] if name not in ("gpt2", "neox") else replace(SHAPES[name], num_attention_heads=4)
        assert config_to_huggingface(shape)["model_type"] == family
    # A width of heads that hidden_size is no multiple of: newer transformers refuse it of Llama alone.
    assert config_to_huggingface(replace(SHAPES["llama"], hidden_size=18))["model_type"] == "mistral"
    for family, settings in (
        ("llama", LLAMA),
        ("mistral", MISTRAL),
        ("qwen2", QWEN2),
        ("gpt2", GPT2),
        ("gpt_neox", NEOX),
    ):
        config = config_from_huggingface(settings)
        assert config_from_huggingface(config_to_huggingface(config, family)).resolved() == config.resolved()
    assert set(FAMILIES) == {"llama", "mistral", "qwen2", "gpt2", "gpt_neox"}


@pytest.mark.parametrize(
    ("changes", "family", "words"),
    [
        ({"mlp_bias": True, "qkv_bias": True}, None, "no family that is known computes this shape"),
        ({"normalization": "layer_norm"}, None, "normalization=rms_norm, and this model layer_norm"),
        ({"parallel_residual": True}, None, "parallel_residual=false, and this model true"),
        ({"rotary_fraction": 0.5}, None, "rotary_fraction=1.0, and this model 0.5"),
        ({}, "gpt2", "the family gpt2 does not compute this shape"),
        ({"qkv_bias": True}, "llama", "qkv_bias=false, and this model true"),
        ({}, "lama", "family=lama is not known; nearest: llama"),
        ({"vocab_size": None}, None, "no vocab_size"),
        ({"build": "mine:build"}, None, "build=mine:build"),
    ],
)
def test_a_shape_that_no_family_has_is_refused(changes, family, words):
    with pytest.raises(ValueError) as fault:
        config_to_huggingface(replace(SHAPES["llama"], **changes), family)
    assert words in str(fault.value) and len(str(fault.value).splitlines()) < 13


def test_dropout_that_a_family_has_no_key_for_is_left_out():
    written = config_to_huggingface(replace(SHAPES["llama"], dropout=0.2, attention_dropout=0.1, init_std=0.05))
    assert written["attention_dropout"] == 0.1 and written["initializer_range"] == 0.05
    assert config_from_huggingface(written).dropout == 0.0
    gpt2 = config_to_huggingface(replace(SHAPES["gpt2"], head_dim=None, dropout=0.2))
    assert gpt2["resid_pdrop"] == gpt2["embd_pdrop"] == 0.2


@pytest.mark.parametrize("content", ["", "[1]", "{", "\x00", "{" * 5000])
def test_a_file_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_the_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_act": "relu"}))
    with pytest.raises(ValueError, match=r"config\.json: this llama is not one"):
        read_config(tmp_path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert isinstance(read_config(str(tmp_path)), GPTConfig)


# ---------------------------------------------------------------- as they are published
_LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
_QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_GPT2_124M = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("published", "preset"),
    [(_LLAMA31_8B, "llama31_8b"), (_QWEN25, "qwen25_0_5b"), (_GPT2_124M, "gpt2_124m")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_settings_are_the_presets(published, preset):
    expected = compose([f"model={preset}", "train.sequence_length=128"], surroundings=SURROUNDINGS).model
    found = replace(config_from_huggingface(published), dropout=0.0, attention_dropout=0.0)
    assert found.resolved() == expected.resolved()
    # And they are written as they were, as far as they matter.
    written = config_to_huggingface(config_from_huggingface(published))
    same = {key for key in written if key in published} - {"bos_token_id", "eos_token_id", "sliding_window"}
    assert len(same) > 10 and {key: written[key] for key in same} == {key: published[key] for key in same}


def test_every_preset_can_be_written():
    files = sorted((PACKAGE / "model").glob("*.yaml"))
    assert len(files) > 15
    for file in files:
        values = yaml.safe_load(file.read_text())
        model = GPTConfig(**{name: float(value) if name == "norm_eps" else value for name, value in values.items()})
        model = replace(model, vocab_size=model.vocab_size or 256, init_std=0.02)
        assert config_from_huggingface(config_to_huggingface(model)).resolved() == model.resolved(), file.name
