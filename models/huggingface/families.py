"""The families of models whose weights are read and written: one table row for each kind of weight.

A row serves both directions; nothing else knows a name or a layout. Rotary positions turn the pairs (x[i], x[i + half])
here as in transformers' models of these families, so that no row permutes the rows of a head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gridtron.core.sharding import Ranges


@dataclass(frozen=True)
class Layout:
    """How a tensor of ours lies in one of theirs.

    Args:
        transposed: a matrix is stored (inputs, outputs), as OpenAI's Conv1D has it; a vector is the same either way.
        part, parts: theirs holds the outputs of several of ours; this one is number ``part`` of ``parts``.
        by_head: their parts take turns head by head (all of head 0, all of head 1); else one follows the other whole.
    """

    transposed: bool = False
    part: int = 0
    parts: int = 1
    by_head: bool = False

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """Of their tensor, from that of ours."""
        whole = (ours[0] * self.parts, *ours[1:])
        return whole[::-1] if self.transposed else whole

    def own_shape(self, theirs: Sequence[int]) -> tuple[int, ...] | None:
        """Of ours, from that of their tensor; None where it does not divide."""
        whole = tuple(theirs[::-1] if self.transposed else theirs)
        if not whole or whole[0] % self.parts:
            return None
        return (whole[0] // self.parts, *whole[1:])

    def outputs(self, start: int, stop: int, rows: int, head: int) -> Ranges:
        """Where our outputs ``start`` to ``stop`` lie among theirs, in order.

        Args:
            start, stop: rows of ours.
            rows: how many ours has.
            head: rows of one head.
        """
        if self.parts == 1:
            return ((start, stop),)
        unit = head if self.by_head else rows
        found = []
        for group in range(start // unit, -(-stop // unit)):
            low, high = max(start, group * unit), min(stop, (group + 1) * unit)
            shift = (group * (self.parts - 1) + self.part) * unit
            found.append((low + shift, high + shift))
        return tuple(found)


PLAIN = Layout()


@dataclass(frozen=True)
class Row:
    """A weight's name here, its name there, with {layer} for the number of a layer, and its layout there."""

    ours: str
    theirs: str
    layout: Layout = PLAIN


@dataclass(frozen=True)
class Setting:
    """A key of their config.json that is an option of GPTConfig as it stands.

    Args:
        theirs, ours: the names.
        default: what transformers takes where the key is absent; REQUIRED: there is none to rely on.
    """

    theirs: str
    ours: str
    default: Any = None


REQUIRED = object()


@dataclass(frozen=True)
class Family:
    """One family.

    Args:
        name: their ``model_type``.
        architecture: their class.
        prefix: of the names in a folder that was saved with a head; files of the bare decoder leave it out.
        rows: the weights.
        settings: keys of config.json that are options as they stand.
        fixed: options that follow from the family.
        activations: their name -> ours; the first of equal meaning is written.
        activation_key: where that name stands.
        only: keys that change what a model computes, with the values under which it is what ours computes; the first is
            what an absent key means.
        ignored: keys that do not matter for the mathematics of a decoder.
        rotary: keys of the base and of the part of a head that turns (None: all of it), and that part where no key has
            it; None: positions are learned.
        windows: keys of a sliding window may be there.
        dropout: keys of the one dropout that there is on the embedding and on the branches.
        biases: (attention, MLP) keys of the biases; None: fixed.
        whole_heads: hidden_size is heads x head_dim.
    """

    name: str
    architecture: str
    prefix: str
    rows: tuple[Row, ...]
    settings: tuple[Setting, ...]
    fixed: Mapping[str, Any]
    activations: Mapping[str, str]
    activation_key: str = "hidden_act"
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    rotary: tuple[str, str | None, float] | None = ("rope_theta", None, 1.0)
    windows: str | None = None
    dropout: tuple[str, ...] = ()
    biases: tuple[str, str] | None = None
    whole_heads: bool = False

    def row(self, name: str) -> tuple[Row, str] | None:
        """The row of one of our names, and the name of the tensor there; None where the family has no such weight."""
        layer = re.search(r"(?<=^blocks\.)\d+(?=\.)", name)
        pattern = name if layer is None else f"blocks.{{layer}}{name[layer.end() :]}"
        for row in self.rows:
            if row.ours == pattern:
                return row, row.theirs if layer is None else row.theirs.format(layer=layer[0])
        return None

    def keys(self) -> Iterator[str]:
        """Every key of config.json that is understood beside those that never matter."""
        yield from (setting.theirs for setting in self.settings)
        yield from (self.activation_key, *self.only, *self.ignored, *self.dropout, *(self.biases or ()))
        if self.rotary is not None:
            yield from ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
            yield from (key for key in self.rotary[:2] if key is not None)
        if self.windows is not None:
            yield from ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


_BOTH = ("weight", "bias")


def _layer_rows(
    prefix: str, names: Mapping[str, str], layout: Layout = PLAIN, kinds: Sequence[str] = _BOTH
) -> Iterator[Row]:
    """Rows of weights and biases of every layer.

    Args:
        prefix: of a layer there, with {layer}.
        names: of modules: here -> there.
        layout: of each.
        kinds: "weight", "bias".
    """
    for ours, theirs in names.items():
        for kind in kinds:
            yield Row(f"blocks.{{layer}}.{ours}.{kind}", f"{prefix}.{theirs}.{kind}", layout)


def _fused_rows(prefix: str, name: str, transposed: bool = False, by_head: bool = False) -> Iterator[Row]:
    """Rows of queries, keys and values that are one module ``name`` there."""
    for part, ours in enumerate("qkv"):
        yield from _layer_rows(prefix, {f"attention.{ours}": name}, Layout(transposed, part, 3, by_head))


_GATED_ROWS = (
    Row("embedding.weight", "model.embed_tokens.weight"),
    *_layer_rows(
        "model.layers.{layer}",
        {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
        kinds=("weight",),
    ),
    *_layer_rows(
        "model.layers.{layer}",
        {
            "attention.q": "self_attn.q_proj",
            "attention.k": "self_attn.k_proj",
            "attention.v": "self_attn.v_proj",
            "attention.out": "self_attn.o_proj",
            "mlp.gate": "mlp.gate_proj",
            "mlp.up": "mlp.up_proj",
            "mlp.down": "mlp.down_proj",
        },
    ),
    Row("final_norm.weight", "model.norm.weight"),
    Row("head.weight", "lm_head.weight"),
)

_GATED = {"normalization": "rms_norm", "position": "rotary", "parallel_residual": False}
_SILU = {"silu": "swiglu", "swish": "swiglu"}
_PLAIN_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # sqrt(2 / pi) to ten digits
    "relu": "relu",
}


_SIZES = (
    Setting("vocab_size", "vocab_size", REQUIRED),
    Setting("hidden_size", "hidden_size", REQUIRED),
    Setting("intermediate_size", "ffn_hidden_size", REQUIRED),
    Setting("num_hidden_layers", "num_layers", REQUIRED),
    Setting("num_attention_heads", "num_attention_heads", REQUIRED),
    Setting("max_position_embeddings", "max_position_embeddings", REQUIRED),
)
"""Of all but GPT-2."""


def _gated_settings(kv_heads: int | None) -> tuple[Setting, ...]:
    return (
        *_SIZES,
        Setting("num_key_value_heads", "num_key_value_heads", kv_heads),
        Setting("head_dim", "head_dim"),
        Setting("rms_norm_eps", "norm_eps", 1e-6),
        Setting("tie_word_embeddings", "tie_embeddings", False),
        Setting("attention_dropout", "attention_dropout", 0.0),
        Setting("initializer_range", "init_std", 0.02),
    )


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    "model.",
    _GATED_ROWS,
    _gated_settings(None),
    _GATED,
    _SILU,
    only={"rope_interleaved": (False, None), "partial_rotary_factor": (1.0, None)},
    ignored=frozenset({"pretraining_tp", "is_llama_config"}),
    biases=("attention_bias", "mlp_bias"),
    whole_heads=True,
)

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    "model.",
    _GATED_ROWS,
    _gated_settings(8),
    {**_GATED, "bias": False, "qkv_bias": False},
    _SILU,
    only={"partial_rotary_factor": (1.0, None)},
    windows="always",
)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    "model.",
    _GATED_ROWS,
    _gated_settings(32),
    {**_GATED, "bias": False, "qkv_bias": True},
    _SILU,
    only={"partial_rotary_factor": (1.0, None), "use_mrope": (False, None)},
    windows="by layer",
)

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    (
        Row("embedding.weight", "transformer.wte.weight"),
        Row("positions.weight", "transformer.wpe.weight"),
        *_layer_rows("transformer.h.{layer}", {"attention_norm": "ln_1", "mlp_norm": "ln_2"}),
        *_fused_rows("transformer.h.{layer}", "attn.c_attn", transposed=True),
        *_layer_rows(
            "transformer.h.{layer}",
            {"attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
            Layout(transposed=True),
        ),
        *(Row(f"final_norm.{kind}", f"transformer.ln_f.{kind}") for kind in _BOTH),
        Row("head.weight", "lm_head.weight"),
    ),
    (
        Setting("vocab_size", "vocab_size", REQUIRED),
        Setting("n_embd", "hidden_size", REQUIRED),
        Setting("n_layer", "num_layers", REQUIRED),
        Setting("n_head", "num_attention_heads", REQUIRED),
        Setting("n_inner", "ffn_hidden_size"),
        Setting("n_positions", "max_position_embeddings", REQUIRED),
        Setting("layer_norm_epsilon", "norm_eps", 1e-5),
        Setting("tie_word_embeddings", "tie_embeddings", True),
        Setting("attn_pdrop", "attention_dropout", 0.1),
        Setting("initializer_range", "init_std", 0.02),
    ),
    {"normalization": "layer_norm", "position": "learned", "bias": True, "parallel_residual": False},
    {"gelu_new": "gelu_tanh", **_PLAIN_ACTIVATIONS},
    "activation_function",
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    ignored=frozenset({
        "n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_hidden_size",
        "summary_proj_to_labels", "summary_type", "summary_use_proj",
    }),
    rotary=None,
    dropout=("resid_pdrop", "embd_pdrop"),
    whole_heads=True,
)  # fmt: skip

GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt_neox.",
    (
        Row("embedding.weight", "gpt_neox.embed_in.weight"),
        *_layer_rows(
            "gpt_neox.layers.{layer}",
            {
                "attention_norm": "input_layernorm",
                "mlp_norm": "post_attention_layernorm",
                "attention.out": "attention.dense",
                "mlp.up": "mlp.dense_h_to_4h",
                "mlp.down": "mlp.dense_4h_to_h",
            },
        ),
        *_fused_rows("gpt_neox.layers.{layer}", "attention.query_key_value", by_head=True),
        *(Row(f"final_norm.{kind}", f"gpt_neox.final_layer_norm.{kind}") for kind in _BOTH),
        Row("head.weight", "embed_out.weight"),
    ),
    (
        *_SIZES,
        Setting("layer_norm_eps", "norm_eps", 1e-5),
        Setting("tie_word_embeddings", "tie_embeddings", False),
        Setting("use_parallel_residual", "parallel_residual", True),
        Setting("attention_dropout", "attention_dropout", 0.0),
        Setting("initializer_range", "init_std", 0.02),
    ),
    {"normalization": "layer_norm", "position": "rotary", "bias": True},
    _PLAIN_ACTIVATIONS,
    only={"attention_bias": (True,)},
    ignored=frozenset({"classifier_dropout", "is_decoder", "attention_probs_dropout_prob", "hidden_dropout_prob"}),
    rotary=("rotary_emb_base", "rotary_pct", 0.25),
    dropout=("hidden_dropout",),
    whole_heads=True,
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, GPT2, GPT_NEOX)}
"""By model_type, in the order in which one is chosen for an export."""

NEVER_MATTER = frozenset({
    "model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "_name_or_path", "name_or_path", "output_attentions", "output_hidden_states", "return_dict",
    "chunk_size_feed_forward", "id2label", "label2id", "_num_labels", "num_labels", "problem_type",
    "task_specific_params", "gradient_checkpointing", "use_bfloat16", "torchscript", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "finetuning_task", "tokenizer_class", "prefix",
    "transformers.js_config", "license", "max_length", "temperature", "top_k", "top_p", "do_sample", "num_beams",
    "repetition_penalty", "experts_implementation",
})  # fmt: skip
"""Keys of any config.json that change nothing in what a decoder computes from tokens and weights."""

BUFFERS = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.(?:inv_freq|original_inv_freq)|(?:attn|attention)\.(?:bias|masked_bias))"
)
"""Names of tensors that are no weights: tables of old files that a model computes by itself."""
