"""The shape of a GPT: one frozen value for GPT-2/GPT-3 and Llama/Qwen alike."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gridtron.core.options import option


@dataclass(frozen=True)
class GPTConfig:
    num_layers: int = option(12, "decoder layers", minimum=1)
    hidden_size: int = option(768, "width of the residual stream", minimum=1)
    num_attention_heads: int = option(12, "query heads", minimum=1)
    num_key_value_heads: int | None = option(None, "key and value heads (GQA); null: as many as query heads", minimum=1)
    head_dim: int | None = option(None, "width of a head; null: hidden_size / num_attention_heads", minimum=1)
    ffn_hidden_size: int | None = option(None, "width inside the MLP; null: 4 x hidden_size", minimum=1)
    vocab_size: int | None = option(None, "size of the vocabulary; null: the tokenizer's", minimum=1)
    max_position_embeddings: int = option(1024, "longest sequence", minimum=1)
    normalization: str = option("rms_norm", "kind of norm", choices=("rms_norm", "layer_norm"))
    norm_eps: float = option(1e-5, "added to the variance inside norms", above=0)
    position: str = option("rotary", "how positions enter", choices=("rotary", "learned"))
    rope_theta: float = option(10000.0, "rotary: base of the wavelengths", above=0)
    rope_scaling: dict[str, Any] | None = option(
        None, "rotary: {type: linear|llama3|yarn|dynamic, factor: ...} as in Hugging Face's configs; null: none"
    )
    rotary_fraction: float = option(1.0, "rotary: part of each head that turns, from its beginning", above=0, maximum=1)
    activation: str = option("swiglu", "of the MLP", choices=("swiglu", "gelu", "gelu_tanh", "relu"))
    bias: bool = option(False, "biases in linears and norms of attention and MLP")
    qkv_bias: bool | None = option(None, "bias of the query, key and value projections; null: as bias")
    mlp_bias: bool | None = option(None, "bias of the MLP's linears; null: as bias")
    parallel_residual: bool = option(False, "attention and MLP both read the layer's input, each normed on its own")
    tie_embeddings: bool = option(False, "the head is the embedding")
    dropout: float = option(0.0, "on the embedding and on each residual branch", minimum=0, below=1)
    attention_dropout: float = option(0.0, "on the attention weights", minimum=0, below=1)
    init_std: float = option(0.02, "standard deviation of the weights at the start", minimum=0)
    build: str | None = option(None, "a model of your own: my_package.models:build (config, grid) -> nn.Module")

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Of each head, how many entries turn: the first ones."""
        return int(self.head_size * self.rotary_fraction)

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def projection_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def feed_forward_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    def resolved(self) -> GPTConfig:
        """The same shape with every null that stands for another value replaced by it: equal shapes are equal."""
        scaling = dict(self.rope_scaling or {})
        kind = scaling.pop("type", None)
        kind = scaling.pop("rope_type", kind)
        scaling = {key: value for key, value in sorted(scaling.items()) if value is not None}
        return replace(
            self,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            ffn_hidden_size=self.ffn_size,
            qkv_bias=self.projection_bias,
            mlp_bias=self.feed_forward_bias,
            rope_theta=self.rope_theta if self.position == "rotary" else 10000.0,
            rope_scaling=None if kind in (None, "default") else {"rope_type": kind, **scaling},
        )

    def sequence_first(self, sequence_parallel: bool) -> bool:
        """Whether activations are (sequence, batch, hidden) and not (batch, sequence, hidden).

        With sequence parallelism a rank's share of the sequence must lie together in memory. Else a sample does, which
        fused attention reads faster; the products of unfused attention take heads and samples as one dimension, which
        only the sequence in front gives without copies.
        """
        return sequence_parallel or self.attention_dropout > 0

    def violations(self) -> list[str]:
        """Every rule that this shape breaks, with the nearest value that does not."""
        found = []
        heads, kv = self.num_attention_heads, self.kv_heads
        if heads % kv:
            nearest = max(count for count in range(1, min(kv, heads) + 1) if heads % count == 0)
            found.append(
                f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv}: each key head serves "
                f"equally many query heads; nearest: num_key_value_heads={nearest}"
            )
        if self.head_dim is None and self.hidden_size % heads:
            lower = max(self.hidden_size // heads, 1) * heads
            found.append(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}: set head_dim, "
                f"or hidden_size={lower} or {lower + heads}"
            )
        found.extend(_rotary_violations(self))
        found.extend(_scaling_violations(self))
        return found


def _rotary_violations(config: GPTConfig) -> list[str]:
    head, turning = config.head_size, config.rotary_size
    if config.position != "rotary":
        if config.rotary_fraction == 1:
            return []
        return [f"rotary_fraction={config.rotary_fraction} has no effect with position={config.position}; leave it out"]
    if head < 1:  # fewer entries than heads, which is told
        return []
    if turning == head and head % 2:
        return [f"head_dim={head} is odd and rotary positions turn pairs; nearest: {head + 1}"]
    if turning % 2 or not turning:
        nearest = max(turning // 2 * 2, 2)
        return [
            f"rotary_fraction={config.rotary_fraction} of head_dim={head} is {turning} entries, and rotary positions "
            f"turn pairs; nearest: rotary_fraction={nearest / head:.12g}"
        ]
    return []


_SCALING_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    ),
}
"""Kind of scaling -> the keys that it needs, and those that it may have (null: its own default)."""


def _scaling_violations(config: GPTConfig) -> list[str]:
    scaling = config.rope_scaling
    if not scaling:
        return []
    if config.position != "rotary":
        return [f"rope_scaling has no effect with position={config.position}; leave it out, or set position=rotary"]
    kind = str(scaling.get("rope_type", scaling.get("type")))
    if kind not in _SCALING_KEYS:
        return [f"rope_scaling type {kind!r} is not known; known: {', '.join(_SCALING_KEYS)}"]
    needed, optional = _SCALING_KEYS[kind]
    found = []
    for key in set(scaling) - {"type", "rope_type", *needed, *optional}:
        near = difflib.get_close_matches(str(key), (*needed, *optional), 1)
        found.append(
            f"rope_scaling of type {kind} has no {key}; " + (f"nearest: {near[0]}" if near else "leave it out")
        )
    if missing := [key for key in needed if key not in scaling]:
        found.append(f"rope_scaling of type {kind} needs {', '.join(missing)}")
    for key in (*needed, *optional):
        value = scaling.get(key)
        if key in scaling and key != "truncate" and not (_is_positive(value) or (value is None and key in optional)):
            found.append(f"rope_scaling.{key}={value} must be a number above 0")
    return found or _scaling_relations(config, kind, scaling)


def _scaling_relations(config: GPTConfig, kind: str, scaling: Mapping[str, Any]) -> list[str]:
    """Rules between values that are each right."""
    found = []
    if float(scaling.get("factor", 1)) < 1:
        found.append(f"rope_scaling.factor={scaling['factor']} must be at least 1: scaling stretches a trained context")
    if kind == "llama3" and float(scaling["low_freq_factor"]) >= float(scaling["high_freq_factor"]):
        found.append(
            f"rope_scaling.low_freq_factor={scaling['low_freq_factor']} must be under "
            f"high_freq_factor={scaling['high_freq_factor']}"
        )
    if kind == "dynamic" and config.rotary_size <= 2:
        found.append(
            f"rope_scaling of type dynamic needs head_dim above 2 (times rotary_fraction), and it is "
            f"{config.rotary_size}; nearest: 4"
        )
    return found


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
