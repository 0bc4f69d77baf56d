"""Every shipped option file composes; the presets have the published number of weights, to the unit."""

import csv
import functools
from pathlib import Path

import pytest

from gridtron.conf.compose import compose
from gridtron.conf.files import PACKAGE, ConfigFiles
from gridtron.conf.rules import Surroundings
from gridtron.core.capabilities import Capabilities

PUBLISHED = Path(__file__).parents[1] / "published" / "param_counts.csv"
NAMES = {
    "GPT-2 124M": ["gpt2_124m"],
    "GPT-2 355M medium": ["gpt2_355m"],
    "GPT-2 774M large": ["gpt2_774m"],
    "GPT-2 1558M xl": ["gpt2_1558m"],
    "Llama-2-7B": ["llama2_7b"],
    "Llama-2-13B": ["llama2_13b"],
    "Llama-3/3.1-8B": ["llama3_8b", "llama31_8b"],
    "Llama-3/3.1-70B": ["llama3_70b", "llama31_70b"],
    "Llama-3.1-405B": ["llama31_405b"],
    "Qwen2.5-0.5B": ["qwen25_0_5b"],
    "Qwen2.5-7B": ["qwen25_7b"],
    "Qwen2.5-72B": ["qwen25_72b"],
    "GPT-3 Small": ["gpt3_small"],
    "GPT-3 175B": ["gpt3_175b"],
}
LIBRARIES = Capabilities(1, ("a device",), True, True, "3.7.1", "nvidia")
ROOMY = Surroundings(cores=10**6, data_fault=lambda config: None, folder_fault=lambda folder: None, libraries=LIBRARIES)


@functools.cache
def plan_of(*overrides):
    """Each composition takes a tenth of a second, and several tests look at the same."""
    return compose(list(overrides), surroundings=ROOMY)


def rows():
    with open(PUBLISHED, newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def count(model):
    """Weights of a decoder by its shape, written out term by term."""
    hidden, ffn, head = model.hidden_size, model.ffn_size, model.head_size
    queries, keys = model.num_attention_heads * head, model.kv_heads * head
    norm = hidden * (2 if model.normalization == "layer_norm" else 1)
    attention = hidden * (queries + 2 * keys) + queries * hidden
    attention += (queries + 2 * keys) * model.projection_bias + hidden * model.bias
    mlp = hidden * ffn * (3 if model.activation == "swiglu" else 2) + (ffn + hidden) * model.bias
    positions = model.max_position_embeddings * hidden if model.position == "learned" else 0
    embeddings = model.vocab_size * hidden * (1 if model.tie_embeddings else 2)
    return embeddings + positions + model.num_layers * (2 * norm + attention + mlp) + norm


def test_every_published_row_has_a_preset():
    assert set(rows()) == set(NAMES)


@pytest.mark.parametrize(("row", "preset"), [(row, preset) for row, presets in NAMES.items() for preset in presets])
def test_published_count(row, preset):
    plan = plan_of(f"model={preset}")
    assert count(plan.model) == int(rows()[row]["computed_from_config"])


def test_rope_of_llama_31():
    for name in ("llama31_8b", "llama31_70b", "llama31_405b"):
        assert plan_of(f"model={name}").model.rope_scaling == {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    assert plan_of("model=llama3_8b").model.rope_scaling is None


NEEDED = {("recompute", "auto"): ["recompute.budget_bytes=1e15"]}
"""What an option file does not go without."""
FILES = [(group, name) for group, names in ConfigFiles().groups().items() for name in names]


@pytest.mark.parametrize(("group", "name"), FILES)
def test_every_option_file_composes(group, name):
    plan = plan_of(f"{group}={name}", *NEEDED.get((group, name), ()))
    assert plan.choices[group] == name


@pytest.mark.parametrize("name", ["recompute", "precision", "optimizer", "lr_schedule"])
def test_an_option_file_for_each_mode(name):
    from gridtron.conf.schema import all_options

    key = next(key for key in (f"{name}.mode", f"{name}.name") if key in all_options())
    for choice in all_options()[key].metadata["choices"]:
        plan = plan_of(f"{name}={choice}", *NEEDED.get((name, choice), ()))
        assert getattr(getattr(plan, name), key.partition(".")[2]) == choice


@pytest.mark.parametrize("file", sorted((PACKAGE / "experiment").glob("*.yaml")), ids=lambda file: file.stem)
def test_experiments_begin_with_their_command(file):
    comments = [line for line in file.read_text().splitlines() if line.startswith("# ") and "@package" not in line]
    assert comments[0] == f"# gridtron train experiment={file.stem}"


def test_first_run():
    plan = plan_of("experiment=first_run")
    model, train = plan.model, plan.train
    assert (model.num_layers, model.num_attention_heads, model.num_key_value_heads, model.vocab_size) == (12, 8, 2, 256)
    assert (train.global_batch_size, train.micro_batch_size) == (16, 2)
    assert plan.grid.tensor == 2 and plan.grid.sequence_parallel and plan.evaluation.every > 0
