"""Tiny models of Hugging Face's families, random in every weight, and what transformers computes with them.

Imports transformers, which takes seconds: for few files, and never for tests of several ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
_STRETCHED = {**_SHAPE, "max_position_embeddings": 64}
_NEOX = {key: value for key, value in {**_SHAPE, "hidden_size": 48}.items() if key != "num_key_value_heads"}
_GPT2: dict[str, Any] = {
    "vocab_size": 101,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SHAPE),
    "llama_theta": ("Llama", {**_SHAPE, "rope_theta": 500000.0}),
    "llama_biases": ("Llama", {**_SHAPE, "attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "llama_attention_bias": ("Llama", {**_SHAPE, "attention_bias": True}),
    "llama_mlp_bias": ("Llama", {**_SHAPE, "mlp_bias": True}),
    "llama_tied": ("Llama", {**_SHAPE, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama31": ("Llama", {**_STRETCHED, "rope_theta": 500000.0, "rope_scaling": _LLAMA3}),
    "linear": ("Llama", {**_STRETCHED, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "dynamic": ("Llama", {**_STRETCHED, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "yarn": ("Llama", {**_STRETCHED, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}),
    "yarn_set": (
        "Llama",
        {
            **_SHAPE,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "mistral": ("Mistral", {**_SHAPE, "head_dim": 8, "sliding_window": None}),
    "mistral_window": ("Mistral", {**_SHAPE, "max_position_embeddings": 2048, "sliding_window": 512}),
    "qwen2": ("Qwen2", {**_SHAPE, "rope_theta": 1000000.0}),
    "qwen2_tied": ("Qwen2", {**_SHAPE, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", _GPT2),
    "gpt2_untied": ("GPT2", {**_GPT2, "n_inner": 37, "activation_function": "relu", "tie_word_embeddings": False}),
    "neox": ("GPTNeoX", {**_NEOX, "rotary_pct": 0.25}),
    "neox_one_after_other": (
        "GPTNeoX",
        {
            **_NEOX,
            "max_position_embeddings": 64,
            "use_parallel_residual": False,
            "rotary_pct": 0.5,
            "rotary_emb_base": 50000,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": True,
        },
    ),
}
"""Name -> (transformers' prefix of classes, settings): odd sizes, and positions to eight times the trained ones."""

FAMILIES = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "GPT2": "gpt2", "GPTNeoX": "gpt_neox"}
"""Prefix of transformers' classes -> model_type."""

LENGTH = 512
_FLOAT32 = torch.float32  # the dtype itself, whatever all_double makes of the word


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of MODELS[name], every weight random: norms and biases too. In float64 under
    :func:`all_double`, since frequencies are made with the model."""
    prefix, settings = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.dtype == dtype
            around = 0.5 if parameter.ndim == 1 else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=_FLOAT32) * 0.2 + around)
    return model


def saved(name: str, folder: Path) -> Path:
    """The model in a folder, as transformers writes it, made once."""
    path = folder / name
    if not path.exists():
        build(name).save_pretrained(path)
    return path


def family(name: str) -> str:
    """The model_type of MODELS[name]."""
    return FAMILIES[MODELS[name][0]]


def tokens() -> tuple[Tensor, Tensor]:
    """(2, LENGTH) tokens and targets."""
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randint(0, 101, (2, LENGTH), generator=generator) for _ in range(2))
    return first, second


@contextlib.contextmanager
def all_double() -> Iterator[None]:
    """transformers computes angles, RMS norms and softmaxes in float32 whatever the weights are. Its own code, run
    where the word float32 means float64, is the reference in double precision: every formula is theirs."""
    words = {word: getattr(torch, word) for word in ("float", "float32")}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    for word in words:
        setattr(torch, word, torch.float64)
    try:
        yield
    finally:
        for word, dtype in words.items():
            setattr(torch, word, dtype)
        torch.set_default_dtype(default)


@functools.cache
def results(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """transformers' logits, mean loss and gradients by their names, computed in ``dtype`` throughout."""
    with all_double() if dtype == torch.float64 else contextlib.nullcontext():
        model = build(name, dtype)
        first, targets = tokens()
        logits = model(first).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    assert logits.dtype == dtype
    head = "embed_out" if family(name) == "gpt_neox" else "lm_head"  # in a file, GPT-NeoX's head has its old name
    gradients = {
        key.replace("lm_head", head): parameter.grad.clone() for key, parameter in model.named_parameters()
    }  # fmt: skip
    return {"logits": logits.detach(), "loss": loss.item(), "gradients": gradients}
