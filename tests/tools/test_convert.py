"""``gridtron convert`` both ways, what it refuses, and that nothing is left of a failure."""

import json
import os
from dataclasses import replace

import parity
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from gridtron.conf.schema import Plan, plan_to_dict
from gridtron.core.checkpoint.layout import step_path
from gridtron.core.checkpoint.stored import Stored
from gridtron.core.checkpoint.whole import write_checkpoint
from gridtron.models import GPT
from gridtron.models.huggingface import save_huggingface
from gridtron.parallel import full_state_dict
from gridtron.tools.cli import main

LLAMA, NEOX = (
    replace(config, num_attention_heads=4, head_dim=None, ffn_hidden_size=24) for config in (parity.LLAMA, parity.NEOX)
)


@pytest.fixture
def source(tmp_path):
    """A Hugging Face folder in bf16 of a Llama, and its weights."""
    state = full_state_dict(GPT(LLAMA, seed=1))
    save_huggingface(tmp_path / "source", LLAMA, state.__getitem__, torch.bfloat16)
    return tmp_path / "source"


def converted(capsys, *arguments):
    assert main(["convert", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, folder, *arguments):
    before = sorted(os.listdir(folder))
    assert main(["convert", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("gridtron: refused")
    assert len(printed.err.splitlines()) < 12 and "Traceback" not in printed.err
    assert sorted(os.listdir(folder)) == before
    return printed.err


def weights_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write_tokenizer(path, size=101):
    words = {f"w{number}": number for number in range(size - 1)} | {"<|endoftext|>": size - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


@pytest.mark.parametrize("shape", [LLAMA, NEOX], ids=["llama", "neox"])
def test_there_and_back_to_the_bit(tmp_path, capsys, shape):
    state = full_state_dict(GPT(shape, seed=1))
    save_huggingface(tmp_path / "source", shape, state.__getitem__, torch.bfloat16)
    said = converted(capsys, f"source={tmp_path / 'source'}", f"target={tmp_path / 'ours'}")
    assert f"{sum(t.numel() for t in state.values()):,} parameters" in said and "checkpoint.init_from=" in said
    stored = Stored(step_path(tmp_path / "ours", 0))
    assert set(stored.names()) == {f"parameters/{name}" for name in state}
    for name, tensor in state.items():
        assert torch.equal(stored.tensor(f"parameters/{name}"), tensor.to(torch.bfloat16))
    extra = stored.manifest.extra
    assert extra["progress"] == {"step": 0, "position": 0, "tokens": 0} and extra["plan"]["model"]["num_layers"] == 2
    converted(capsys, f"source={tmp_path / 'ours'}", f"target={tmp_path / 'back'}", "shard_bytes=4000")
    before, after = weights_of(tmp_path / "source"), weights_of(tmp_path / "back")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    settings = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "back")]
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    ("asked", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("fp64", torch.float64)]
)
def test_in_another_format(tmp_path, capsys, source, asked, dtype):
    converted(capsys, f"source={source}", f"target={tmp_path / 'ours'}", f"dtype={asked}")
    stored = Stored(step_path(tmp_path / "ours", 0))
    assert {stored.dtype(name) for name in stored.names()} == {dtype}
    converted(capsys, f"source={tmp_path / 'ours'}", f"target={tmp_path / 'back'}", "dtype=bf16")
    before, after = weights_of(source), weights_of(tmp_path / "back")
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    if asked != "fp16":  # which holds less
        assert all(torch.equal(before[name], after[name]) for name in before)


def write_run(path, extra, tensors):
    """The checkpoint of a run that kept wide weights beside its own in bf16."""
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_checkpoint(step_path(path / "checkpoints", 7), entries, tensors.__getitem__, extra)


def test_a_run_in_bf16_gives_its_weights_or_the_wide_ones(tmp_path, capsys):
    wide = full_state_dict(GPT(LLAMA, seed=4))
    tensors = {}
    for name, tensor in wide.items():
        tensors[f"parameters/{name}"] = tensor.to(torch.bfloat16)
        tensors |= {f"optimizer/{name}/main": tensor, f"optimizer/{name}/exp_avg": torch.zeros_like(tensor)}
    write_run(tmp_path / "run", {"plan": plan_to_dict(Plan(model=LLAMA))}, tensors)
    converted(capsys, f"source={tmp_path / 'run'}", f"target={tmp_path / 'narrow'}")
    converted(capsys, f"source={tmp_path / 'run'}", f"target={tmp_path / 'wide'}", "dtype=fp32")
    narrow, whole = weights_of(tmp_path / "narrow"), weights_of(tmp_path / "wide")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(whole[name], wide["blocks.1.mlp.up.weight"])
    assert torch.equal(narrow[name], wide["blocks.1.mlp.up.weight"].to(torch.bfloat16))


def test_a_tokenizer_travels_along(tmp_path, capsys):
    """From the source to the target by way of a checkpoint, or from a run's data.tokenizer, with what lies beside."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = full_state_dict(GPT(LLAMA, seed=1))
    save_huggingface(tmp_path / "source", LLAMA, state.__getitem__, torch.float32)
    write_tokenizer(tmp_path / "source" / "tokenizer.json")
    converted(capsys, f"source={tmp_path / 'source'}", f"target={tmp_path / 'ours'}")
    said = converted(capsys, f"source={tmp_path / 'ours'}", f"target={tmp_path / 'back'}")
    assert "with its tokenizer" in said
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer("w7 w5 w99").input_ids == [7, 5, 99] and tokenizer.eos_token_id == 100
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.config.eos_token_id == 100 and model.config.bos_token_id is None
    (tmp_path / "source" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    converted(capsys, f"source={tmp_path / 'ours'}", f"target={tmp_path / 'again'}")
    beside = (tmp_path / "again" / "tokenizer_config.json").read_text()
    assert beside == '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    config = tmp_path / "source" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token_id": 7, "eos_token_id": [5, 9]}))
    (tmp_path / "source" / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    converted(capsys, f"source={tmp_path / 'ours'}", f"target={tmp_path / 'ids'}")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ids")
    assert model.config.bos_token_id == 7 and model.generation_config.eos_token_id == [5, 9]


def test_requests_that_are_wrong(tmp_path, capsys, source):
    target = f"target={tmp_path / 'made'}"
    both = refused(capsys, tmp_path)
    assert "source= is missing" in both and "target= is missing" in both
    for arguments, words in (
        ([f"source={tmp_path / 'nowhere'}", target], "no such folder"),
        ([f"source={source / 'config.json'}", target], "it is a file"),
        ([f"source={source}", f"target={source}"], "exists; give another folder"),
        ([f"source={source}", target, "dtype=bf17"], "not one of fp32, bf16, fp16, fp64"),
        ([f"source={source}", target, "shard_bytes=7"], "shard_bytes=7 is of a Hugging Face target"),
        (["source=", target], "source= is missing"),
        ([f"source={source}", target, "family=llama"], "family=llama is of a Hugging Face target"),
        ([f"source={source}", target, "shard_bytes=0"], "must be at least 1"),
        ([f"source={source}", target, "tokeniser=x"], "convert has no option tokeniser"),
        ([f"source={tmp_path}", target], "holds no complete checkpoint"),
        ([f"source={source}", target, "-m"], "convert takes source="),
    ):
        assert words in refused(capsys, tmp_path, *arguments), arguments


def test_sources_that_are_wrong(tmp_path, capsys, source):
    target = f"target={tmp_path / 'made'}"
    converted(capsys, f"source={source}", f"target={tmp_path / 'ours'}")
    text = refused(capsys, tmp_path, f"source={tmp_path / 'ours'}", target, "family=gpt2")
    assert "the family gpt2 does not compute this shape" in text and "normalization=layer_norm" in text
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"hidden_act": "relu", "rope_interleaved": True}))
    text = refused(capsys, tmp_path, f"source={source}", target)
    assert "hidden_act=relu" in text and "rope_interleaved=true" in text
    (source / "config.json").unlink()
    assert "has no config.json" in refused(capsys, tmp_path, f"source={source}", target)


def test_a_checkpoint_of_something_else(tmp_path, capsys):
    target = f"target={tmp_path / 'made'}"
    state = {f"parameters/{name}": tensor for name, tensor in full_state_dict(GPT(LLAMA, seed=1)).items()}
    write_run(tmp_path / "silent", {}, state)
    assert "does not say which model" in refused(capsys, tmp_path, f"source={tmp_path / 'silent'}", target)
    own = plan_to_dict(Plan(model=replace(LLAMA, build="mine:build")))
    write_run(tmp_path / "own", {"plan": own}, state)
    assert "a model of its user's own" in refused(capsys, tmp_path, f"source={tmp_path / 'own'}", target)
    short = {name: tensor for name, tensor in state.items() if name != "parameters/head.weight"}
    write_run(tmp_path / "short", {"plan": plan_to_dict(Plan(model=LLAMA))}, short)
    assert "missing head.weight" in refused(capsys, tmp_path, f"source={tmp_path / 'short'}", target)
    write_run(tmp_path / "bad", {"plan": {"model": {"num_layers": "many"}}}, state)
    assert "model.num_layers=many" in refused(capsys, tmp_path, f"source={tmp_path / 'bad'}", target)
    write_run(tmp_path / "run", {"plan": plan_to_dict(Plan(model=replace(LLAMA, parallel_residual=True)))}, state)
    text = refused(capsys, tmp_path, f"source={tmp_path / 'run'}", target)
    assert "no family that is known computes this shape" in text and "parallel_residual" in text


def test_damage_found_on_the_way_leaves_nothing(tmp_path, capsys, source):
    """Both ways: the target is not there, nor what was begun of it."""
    target = f"target={tmp_path / 'made'}"
    converted(capsys, f"source={source}", f"target={tmp_path / 'ours'}")
    file = step_path(tmp_path / "ours", 0) / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "checksum" in refused(capsys, tmp_path, f"source={tmp_path / 'ours'}", target)
    tied = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(tied))
    assert "lm_head.weight differs from" in refused(capsys, tmp_path, f"source={source}", target)


def test_a_note_of_what_is_not_computed(tmp_path, capsys, source):
    settings = json.loads((source / "config.json").read_text())
    written = settings | {"model_type": "mistral", "sliding_window": 32}
    (source / "config.json").write_text(
        json.dumps({k: v for k, v in written.items() if k not in ("attention_bias", "mlp_bias")})
    )
    assert "note: sliding_window=32" in converted(capsys, f"source={source}", f"target={tmp_path / 'ours'}")


def test_paths_are_expanded_and_links_are_read(tmp_path, capsys, source, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    os.symlink(source, tmp_path / "link")
    converted(capsys, "source=~/link", "target=~/new/ours")
    assert (tmp_path / "new" / "ours" / "step-00000000" / "manifest.json").is_file()
    assert sorted(os.listdir(tmp_path / "new")) == ["ours"]


def test_tensors_of_the_source_are_not_changed(tmp_path, capsys, source):
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    converted(capsys, f"source={source}", f"target={tmp_path / 'ours'}")
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
