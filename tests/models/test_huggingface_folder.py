"""Folders of Hugging Face's as they come: links, old names, damage, what lies outside; and what a failure leaves."""

import json
import os
from dataclasses import replace

import pytest
import torch
from parity import GPT2, LLAMA, NEOX
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from gridtron.core import Grid
from gridtron.core.files import Files
from gridtron.models import GPT
from gridtron.models.huggingface import load_huggingface, read_config, save_huggingface
from gridtron.models.huggingface.reading import parameter_shapes
from gridtron.parallel import full_state_dict

SHAPES = {
    "llama": LLAMA,
    "gpt2": replace(GPT2, num_attention_heads=4),
    "neox": replace(NEOX, num_attention_heads=4),
}


class Quick(Files):
    """A disk that is not waited for."""

    def sync(self, file):
        file.flush()

    def sync_folder(self, path):
        pass


def write(path, shape="llama", files=None, **options):
    """A folder of random weights, and these."""
    state = {
        name: torch.randn(sizes, generator=torch.Generator().manual_seed(number))
        for number, (name, sizes) in enumerate(parameter_shapes(SHAPES[shape]).items())
    }
    save_huggingface(path, SHAPES[shape], state.__getitem__, torch.float32, files=files or Quick(), **options)
    return state


def change(path, function):
    """The tensors of a folder's one file, changed in place."""
    tensors = load_file(path / "model.safetensors")
    function(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def read(path):
    model = GPT(read_config(path), seed=2)
    load_huggingface(model, path)
    return full_state_dict(model)


def same(found, state):
    return found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def refused(path, *words):
    """Everything is told, and the model is as it was."""
    model = GPT(read_config(path), seed=2)
    before = full_state_dict(model)
    with pytest.raises(ValueError) as fault:
        load_huggingface(model, path)
    for word in words:
        assert word in str(fault.value), str(fault.value)
    assert len(str(fault.value).splitlines()) < 13
    assert same(full_state_dict(model), before)


@pytest.mark.parametrize(("shape", "shard_bytes"), [("llama", 1), ("neox", 4000), ("gpt2", 4000), ("gpt2", 10**9)])
def test_one_file_or_many(tmp_path, shape, shard_bytes):
    state = write(tmp_path / "made", shape, shard_bytes=shard_bytes)
    assert same(read(tmp_path / "made"), state)
    files = {file.name for file in (tmp_path / "made").iterdir()}
    if shard_bytes == 10**9:
        assert files == {"config.json", "model.safetensors"}
        return
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    assert files == {"config.json", "model.safetensors.index.json", *index["weight_map"].values()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())


def test_links_are_followed(tmp_path):
    """A hub's cache is a folder of links into another."""
    state = write(tmp_path / "blobs", shard_bytes=4000)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        os.symlink(file, tmp_path / "snapshot" / file.name)
    assert same(read(tmp_path / "snapshot"), state)


@pytest.mark.parametrize(("shape", "prefix"), [("llama", "model."), ("gpt2", "transformer."), ("neox", "gpt_neox.")])
def test_names_without_their_prefix_and_tables_of_old_files(tmp_path, shape, prefix):
    """openai-community/gpt2 has neither prefix nor head, and a mask in every layer."""
    state = write(tmp_path / "made", shape)
    old = {
        "llama": "layers.0.self_attn.rotary_emb.inv_freq",
        "gpt2": "h.1.attn.bias",
        "neox": "layers.0.attention.masked_bias",
    }

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)
        tensors[old[shape]] = torch.ones(3)

    change(tmp_path / "made", rename)
    assert same(read(tmp_path / "made"), state)


def test_files_are_opened_anew_between_slices(tmp_path, monkeypatch):
    """What was read of a mapped file is let go of after a while, and nothing else changes."""
    state = write(tmp_path / "made", "neox")
    monkeypatch.setattr("gridtron.models.huggingface.folder._MAPPED", 0)
    assert same(read(tmp_path / "made"), state)


def test_names_and_shapes_are_all_told(tmp_path):
    write(tmp_path / "made")

    def spoil(tensors):
        tensors["model.layers.0.self_attn.q_proj.wait"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
        tensors["model.norm.weight"] = torch.ones(17)
        tensors["lm_head.weight"] = torch.ones(101, 16, dtype=torch.int32)

    change(tmp_path / "made", spoil)
    refused(
        tmp_path / "made",
        "the weights are not those of its config.json",
        "missing: model.layers.0.self_attn.q_proj.weight",
        "unexpected: model.layers.0.self_attn.q_proj.wait",
        "model.norm.weight has shape [17] and should have [16]",
        "lm_head.weight is of I32; weights are read from F64, F32, F16, BF16",
    )


@pytest.mark.parametrize("name", ["model.\x1b[2J", "x" * 10**4, "two\nlines"])
def test_names_that_are_none(tmp_path, name):
    write(tmp_path / "made")
    change(tmp_path / "made", lambda tensors: tensors.update({name: torch.ones(1)}))
    refused(tmp_path / "made", "is no tensor's name")


def load_on_rank(path, grid_sizes):
    with Grid.create(**grid_sizes) as grid:
        model = GPT(read_config(path), grid, seed=2)
        try:
            load_huggingface(model, path, grid)
        except ValueError as fault:
            return str(fault)
    return "loaded"


@pytest.mark.case(30)
def test_every_rank_tells_the_same(tmp_path):
    write(tmp_path / "made")
    change(tmp_path / "made", lambda tensors: tensors.pop("lm_head.weight"))
    first, second = run_ranks(load_on_rank, 2, tmp_path / "made", {"pipeline": 2})
    assert first == second and "missing: lm_head.weight" in first


def test_another_model_is_refused(tmp_path):
    write(tmp_path / "made")
    model = GPT(replace(LLAMA, num_layers=1, ffn_hidden_size=12), seed=0)
    with pytest.raises(ValueError) as fault:
        load_huggingface(model, tmp_path / "made")
    assert "unexpected: blocks.1." in str(fault.value) and "has shape (11, 16), the model's is (12, 16)" in str(
        fault.value
    )


def test_a_stored_head_that_is_the_embedding(tmp_path):
    """The same twice is passed over; another one is not what tie_word_embeddings says."""
    state = write(tmp_path / "made", "gpt2")
    change(
        tmp_path / "made", lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"].clone()})
    )
    assert same(read(tmp_path / "made"), state)
    change(tmp_path / "made", lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        read(tmp_path / "made")


# ---------------------------------------------------------------- damage and what lies elsewhere
@pytest.mark.parametrize("place", ["../made.safetensors", "/etc/passwd", "sub/a.safetensors", "weights.bin", 7])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, place):
    write(tmp_path / "made", shard_bytes=4000)
    path = tmp_path / "made" / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["model.norm.weight"] = place
    path.write_text(json.dumps(content))
    refused(tmp_path / "made", "names files that are none of this folder's", str(place))


def test_an_index_that_does_not_hold(tmp_path):
    write(tmp_path / "made", shard_bytes=4000)
    path = tmp_path / "made" / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    first = content["weight_map"]["model.embed_tokens.weight"]
    moved = {**content["weight_map"], "model.norm.weight": first}
    path.write_text(json.dumps({"weight_map": moved}))
    refused(tmp_path / "made", f"{first} lacks tensors", "model.norm.weight")
    (tmp_path / "made" / first).unlink()
    refused(tmp_path / "made", "names files that are not there", first)
    path.write_text(json.dumps({"weight_map": []}))
    refused(tmp_path / "made", "has no weight_map")


@pytest.mark.parametrize("kept", [0, 7, 100, 5000])
def test_a_file_cut_short_is_refused(tmp_path, kept):
    write(tmp_path / "made")
    file = tmp_path / "made" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(tmp_path / "made", "is not a whole safetensors file", "model.safetensors")


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    write(tmp_path / "made")
    (tmp_path / "made" / "model.safetensors").rename(tmp_path / "made" / "pytorch_model.bin")
    refused(tmp_path / "made", "pytorch_model.bin", "nothing is unpickled here", "safe_serialization=True")
    (tmp_path / "made" / "pytorch_model.bin").unlink()
    refused(tmp_path / "made", "holds neither model.safetensors nor model.safetensors.index.json")


def test_a_number_of_layers_out_of_all_proportion(tmp_path):
    """Nothing of that size is built on the word of a text file."""
    write(tmp_path / "made")
    path = tmp_path / "made" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match="names 1000000000 layers, and there are 21 tensors"):
        load_huggingface(GPT(LLAMA, seed=0), tmp_path / "made")


# ---------------------------------------------------------------- writing
class Failing(Files):
    """The disk is full after so many writes."""

    def __init__(self, writes):
        self.left = writes

    def write(self, file, content):
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")
        super().write(file, content)


@pytest.mark.parametrize("writes", [0, 1, 5, 12])
def test_a_failure_leaves_nothing(tmp_path, writes):
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "made", shard_bytes=4000, files=Failing(writes))
    assert os.listdir(tmp_path) == []


def test_what_is_there_stays(tmp_path):
    (tmp_path / "made").mkdir()
    with pytest.raises(ValueError, match="exists; give another folder"):
        write(tmp_path / "made")
    assert os.listdir(tmp_path) == ["made"] and os.listdir(tmp_path / "made") == []


def test_one_tensor_at_a_time(tmp_path):
    """Each weight is asked for once, in the order of the files, and beside it at most one of theirs is put together."""
    asked = []
    state = full_state_dict(GPT(SHAPES["neox"], seed=1))

    def one(name):
        asked.append(name)
        return state[name]

    save_huggingface(tmp_path / "made", SHAPES["neox"], one, torch.bfloat16)
    assert sorted(asked) == sorted(state) and len(set(asked)) == len(asked)
    assert {tensor.dtype for tensor in load_file(tmp_path / "made" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "made" / "config.json").read_text())["torch_dtype"] == "bfloat16"
