"""Weights and settings of Hugging Face's families against transformers itself: logits at every position, gradients,
what is written and read again."""

import hugging
import pytest
import torch
from hugging import MODELS
from safetensors.torch import load_file

from gridtron.models import GPT
from gridtron.models.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    load_huggingface,
    read_config,
    save_huggingface,
)
from gridtron.parallel import full_state_dict

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
SCALED = ("llama_theta", "llama31", "linear", "dynamic", "yarn", "yarn_set", "neox_one_after_other")


def named(cases):
    """Rows 11 and 39 of the known failures: layouts of q and k, settings of rotary positions."""
    return [
        pytest.param(name, marks=pytest.mark.case(39) if name in SCALED else pytest.mark.case(11)) for name in cases
    ]


def loaded(path, dtype=torch.float32):
    model = GPT(read_config(path), seed=0, dtype=dtype)
    load_huggingface(model, path)
    return model.eval()  # GPT-2's settings have dropout


def in_both_formats():
    """float64 of all, in which no fault hides; in make test float32 of some."""
    for name in MODELS:
        case = pytest.mark.case(39 if name in SCALED else 11)
        yield pytest.param(name, torch.float64, id=f"{name}-float64", marks=case)
        some = name in ("llama", "llama31", "yarn", "dynamic", "gpt2", "neox")
        yield pytest.param(
            name, torch.float32, id=f"{name}-float32", marks=[case] if some else [case, pytest.mark.slow]
        )


@pytest.mark.sample(12)
@pytest.mark.parametrize(("name", "dtype"), list(in_both_formats()))
def test_logits_loss_and_gradients_are_those_of_transformers(name, dtype, folder):
    path = hugging.saved(name, folder)
    expected = hugging.results(name, dtype)
    model = loaded(path, dtype)
    tokens, targets = hugging.tokens()
    assert float((model(tokens).detach() - expected["logits"]).abs().max()) < BOUNDS[dtype]
    loss = model(tokens, targets).mean()
    loss.backward()
    assert abs(loss.item() - expected["loss"]) < BOUNDS[dtype]
    # Written as weights are, gradients have transformers' names and layouts.
    gradients = full_state_dict(model, of="gradients")
    target = folder / f"gradients-{name}-{dtype}"
    save_huggingface(target, read_config(path), gradients.__getitem__, dtype)
    written, theirs = load_file(target / "model.safetensors"), expected["gradients"]
    assert written.keys() == theirs.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    for key, gradient in theirs.items():
        error = float((written[key] - gradient).abs().max())
        assert error < BOUNDS[dtype] * max(float(gradient.abs().max()), 1e-3 * scale), key


@pytest.mark.parametrize("name", named(MODELS))
def test_what_is_read_and_written_again_is_the_same_to_the_bit(name, folder):
    path = hugging.saved(name, folder)
    target = folder / f"again-{name}"
    state = full_state_dict(loaded(path))
    config, family = read_config(path), hugging.family(name)
    save_huggingface(target, config, state.__getitem__, torch.float32, family, shard_bytes=20_000)
    files = sorted(target.glob("*.safetensors"))
    held = [load_file(file) for file in files]
    assert len(files) > 1
    assert all(sum(t.nbytes for t in tensors.values()) <= 20_000 or len(tensors) == 1 for tensors in held)
    written = {key: tensor for tensors in held for key, tensor in tensors.items()}
    before = load_file(path / "model.safetensors")
    assert written.keys() == before.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in before.items())
    again = full_state_dict(loaded(target))
    assert all(torch.equal(again[key], tensor) for key, tensor in state.items())


OFTEN = ("llama31", "llama_biases", "yarn_set", "mistral", "qwen2_tied", "gpt2", "gpt2_untied", "neox_one_after_other")


@pytest.mark.case(11, 39)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in MODELS])
def test_transformers_loads_what_is_written(name, folder):
    from transformers import AutoModelForCausalLM

    path = hugging.saved(name, folder)
    target = folder / f"for-transformers-{name}"
    save_huggingface(target, read_config(path), full_state_dict(loaded(path)).__getitem__, torch.float32)
    model, report = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager", output_loading_info=True)
    assert not any(report.values()), report
    tokens, _ = hugging.tokens()
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, hugging.build(name)(tokens).logits)
    assert model.dtype == torch.float32 and model.config.vocab_size == 101


@pytest.mark.parametrize("name", named(MODELS))
def test_settings_survive_both_ways_and_in_both_spellings(name, folder):
    """transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling: both say the same."""
    config = read_config(hugging.saved(name, folder))
    written = config_to_huggingface(config)
    assert config_from_huggingface(written).resolved() == config.resolved()
    older = {"model_type": hugging.family(name), **MODELS[name][1]}
    assert config_from_huggingface(older).resolved() == config.resolved()
