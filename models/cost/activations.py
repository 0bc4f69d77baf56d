"""Bytes that a microbatch's forward pass leaves for the backward pass, as pure functions of the shape.

Two countings in one. With ``attention="unfused", dropout_mask="stored"`` it is that of Korthikanti et al. 2022
(arXiv:2205.05198, sections 4.1 and 4.2, table 2): every operand of the backward pass, dropout masks of one byte an
element; what that paper leaves out is named in ``NOT_IN_THE_PAPER``. With ``attention="flash",
dropout_mask="recomputed"`` it is what this project's layers keep: each tensor once, masks drawn again.

Symbols: s sequence, b batch, h hidden, a heads and k key/value heads of this rank, d their width, f this rank's part of
the MLP, v of the vocabulary, t tensor ranks, w bytes an element, W bytes of a wide one (float32 or wider).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gridtron.core.kernels.config import chunk_rows
from gridtron.core.sharding import even_ranges
from gridtron.models.config import GPTConfig
from gridtron.models.heads import HeadSplit
from gridtron.parallel.operations import forward_sum, kept_operators

NOT_IN_THE_PAPER = frozenset(
    {"norm statistics", "logsumexp", "causal mask", "rotary tables", "indices", "loss statistics"}
)
"""Entries that Korthikanti et al. 2022 leave out as small."""

BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
"""Of an element of parameters and activations in each precision."""


@dataclass(frozen=True)
class TensorShare:
    """What one rank of the tensor axis holds of every layer.

    Args:
        heads, kv_heads: attention heads; a key/value head may lie on several ranks.
        attended_kv_heads: key/value heads as the attention core is given them: one a query head where they are picked
            by index.
        ffn: columns of the MLP.
        vocabulary: rows of embedding and head.
    """

    heads: int
    kv_heads: int
    attended_kv_heads: int
    ffn: int
    vocabulary: int

    @staticmethod
    def of(config: GPTConfig, tensor: int = 1, rank: int = 0) -> TensorShare:
        """That of ``rank`` of ``tensor`` ranks; the first rank's is the largest."""
        assert config.vocab_size is not None
        split = HeadSplit.over(config.num_attention_heads, config.kv_heads, tensor)
        heads, kv = (sum(stop - start for start, stop in rows[rank]) for rows in (split.query, split.key_value))
        picked = split.picked_by_index(rank, config.num_attention_heads // config.kv_heads)
        ffn, vocabulary = (even_ranges(size, tensor)[rank] for size in (config.ffn_size, config.vocab_size))
        return TensorShare(heads, kv, heads if picked else kv, ffn[1] - ffn[0], vocabulary[1] - vocabulary[0])


@dataclass(frozen=True)
class Microbatch:
    """One microbatch on one rank of the tensor axis.

    Args:
        config: shape of the model, with vocab_size.
        batch: samples.
        length: tokens of each.
        tensor: ranks of the tensor axis.
        tensor_rank: which of them.
        sequence_parallel: between tensor-parallel regions a rank holds length / tensor tokens of each sample.
        itemsize: bytes of an element of an activation.
        attention: "flash" (keeps its operands, its result and a number a row) or "unfused" (the weights too). A model
            with attention dropout is unfused whatever is said here.
        dropout_mask: "recomputed" or "stored" (one byte an element).
        chunked_loss: the logits exist a chunk of tokens at a time.
    """

    config: GPTConfig
    batch: int
    length: int
    tensor: int = 1
    tensor_rank: int = 0
    sequence_parallel: bool = False
    itemsize: int = 2
    attention: str = "flash"
    dropout_mask: str = "recomputed"
    chunked_loss: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def own_tokens(self) -> int:
        """Outside of tensor-parallel regions."""
        return self.tokens // self.tensor if self.sequence_parallel else self.tokens

    @property
    def wide(self) -> int:
        return max(4, self.itemsize)

    @property
    def share(self) -> TensorShare:
        return TensorShare.of(self.config, self.tensor, self.tensor_rank)

    @property
    def unfused(self) -> bool:
        return self.attention == "unfused" or self.config.attention_dropout > 0

    @property
    def residual(self) -> int:
        """Bytes of the residual stream: s b h w, over t with sequence parallelism."""
        return self.own_tokens * self.config.hidden_size * self.itemsize

    def mask(self, elements: int, probability: float) -> int:
        """Bytes of a dropout mask that is kept."""
        return elements if self.dropout_mask == "stored" and probability > 0 else 0


def layer_activations(micro: Microbatch, policy: str = "none", operations: Collection[str] = ()) -> dict[str, int]:
    """Bytes that one decoder layer keeps, by what they are.

    Without recomputation and unfused, 16 bit and 4 h wide, s b h (10 + 24/t + 5 a s / (h t)), or with sequence
    parallelism s b h / t (34 + 5 a s / h) (Korthikanti et al. 2022, table 2). "selective" takes the attention core away
    (5 a s^2 b there); "full" keeps the layer's input alone.

    Args:
        micro: the microbatch.
        policy: "none", "selective", "full", or "operations".
        operations: of "operations": what is recomputed beside everything elementwise (see
            :mod:`gridtron.parallel.operations`).
    """
    if policy == "full":
        return {"layer input": micro.residual}
    if policy == "operations":
        return _kept_results(micro, operations)
    kept = {"layer input": micro.residual, "attention norm": micro.residual}
    kept |= attention_core_inputs(micro) if policy == "selective" else attention_core(micro)
    tokens, w, config = micro.tokens, micro.itemsize, micro.config
    share = micro.share
    mixed = tokens * share.heads * config.head_size * w
    hidden = tokens * share.ffn * w
    kept["attention result"] = mixed
    if not config.parallel_residual:  # there it is the layer's
        kept["MLP input"] = micro.residual
    kept["MLP norm"] = micro.residual
    if config.activation == "swiglu":
        kept["gate and up"] = 2 * hidden
    elif config.activation != "relu":  # whose gradient follows from its result
        kept["up"] = hidden
    kept["activation result"] = hidden
    kept["dropout masks"] = 2 * micro.mask(micro.own_tokens * config.hidden_size, config.dropout)
    kept["norm statistics"] = 2 * norm_statistics(micro)
    return kept


def _kept_results(micro: Microbatch, operations: Collection[str]) -> dict[str, int]:
    """What a selective checkpoint around a layer keeps: its input, and results of operators that are not recomputed."""
    config, share, w = micro.config, micro.share, micro.itemsize
    kept, names = {"layer input": micro.residual}, kept_operators(operations)
    whole = micro.tokens * config.hidden_size * w
    mixed = micro.tokens * share.heads * config.head_size * w
    if names & {"aten.mm", "aten.addmm"}:
        hidden = micro.tokens * share.ffn * w
        kept["q, k and v"] = sum(attention_core_inputs(micro).values())
        kept |= {"gate and up": 2 * hidden} if config.activation == "swiglu" else {"up": hidden}
        # Those that are added to the residual stream; a sum takes their place.
        kept["products"] = 0 if micro.tensor > 1 and forward_sum(operations) == "release" else 2 * whole
    if micro.tensor > 1 and "_c10d_functional.all_reduce" in names:
        kept["sums"] = 2 * micro.residual
    if config.dropout > 0 and "gridtron.counted_dropout" in names:
        kept["dropout results"] = 2 * micro.residual
    square = share.heads * micro.length * micro.tokens * w
    if not micro.unfused:
        if "aten._scaled_dot_product_flash_attention" in names:
            kept |= {"attention result": mixed, "logsumexp": micro.tokens * share.heads * micro.wide}
        return kept
    if "aten.bmm" in names:
        kept |= {"attention scores": square, "attention result": mixed}
    weights = (
        "gridtron.scaled_masked_softmax" in names,
        "gridtron.counted_dropout" in names and config.attention_dropout > 0,
    )
    return kept | {"attention weights": square * sum(weights)}


def attention_core_inputs(micro: Microbatch) -> dict[str, int]:
    """q, k and v as the projections (and rotations) leave them: s b d (a + 2 k) w."""
    share = micro.share
    return {"q, k and v": micro.tokens * micro.config.head_size * (share.heads + 2 * share.kv_heads) * micro.itemsize}


def attention_core(micro: Microbatch) -> dict[str, int]:
    """What softmax(q k^T) v keeps, but for its result.

    Unfused: its operands, the weights before and after dropout, and the mask: 5 a s^2 b in 16 bit (Korthikanti et al.
    2022, section 4.1.1). Fused: its operands and one wide number a row (Dao et al. 2022, arXiv:2205.14135, algorithm
    1).
    """
    share, config = micro.share, micro.config
    tokens, w = micro.tokens, micro.itemsize
    kv = share.heads if micro.unfused else share.attended_kv_heads
    kept = {"q, k and v": tokens * config.head_size * (share.heads + 2 * kv) * w}
    if not micro.unfused:
        return kept | {"logsumexp": tokens * share.heads * micro.wide}
    square = share.heads * micro.length * tokens
    dropped = config.attention_dropout > 0
    kept["attention weights"] = square * w * (2 if dropped else 1)
    kept["attention mask"] = micro.mask(square, config.attention_dropout)
    kept["causal mask"] = micro.length**2
    return kept


def norm_statistics(micro: Microbatch) -> int:
    """RMSNorm: one wide number a token; LayerNorm: two, in the parameters' format."""
    if micro.config.normalization == "rms_norm":
        return micro.own_tokens * micro.wide
    return 2 * micro.own_tokens * micro.itemsize


def stage_inputs(micro: Microbatch) -> dict[str, int]:
    """What the first stage keeps beside its layers: indices, and the embedding's dropout mask (s b h / t there)."""
    config, tokens = micro.config, micro.tokens
    # Split: which tokens are this rank's own, and their rows.
    indices = 8 * tokens + (tokens if micro.tensor > 1 else 0)
    if config.position == "learned":
        indices += 8 * micro.length
    return {
        "indices": indices,
        "embedding dropout mask": micro.mask(micro.own_tokens * config.hidden_size, config.dropout),
    }


def rotary_tables_bytes(micro: Microbatch) -> int:
    """Cosines and sines that the layers of a stage share: s d w, d the entries of a head that turn."""
    return micro.length * micro.config.rotary_size * micro.itemsize if micro.config.position == "rotary" else 0


def stage_outputs(micro: Microbatch) -> dict[str, int]:
    """What the last stage keeps beside its layers: the final norm's input and result, and the loss's exponents, wide:
    2 s b h / t, 2 s b h / t and 4 s b v / t in 16 bit (Korthikanti et al. 2022, section 4.3)."""
    return {
        "final norm input": micro.residual,
        "final norm": micro.residual,
        "norm statistics": norm_statistics(micro),
        "exponents": 0 if micro.chunked_loss else micro.tokens * micro.share.vocabulary * micro.wide,
        # A maximum, a factor and an index a token.
        "loss statistics": micro.tokens * (2 * micro.wide + 8),
    }


def stage_activations(
    micro: Microbatch, policies: tuple[str, ...], first: bool, last: bool, operations: Collection[str] = ()
) -> dict[str, int]:
    """Bytes that one microbatch keeps on a stage.

    Args:
        micro: the microbatch.
        policies: of each of the stage's layers.
        first, last: whether the embedding, and final norm, head and loss, are here.
        operations: see :func:`layer_activations`.
    """
    kept: dict[str, int] = {}
    parts = [layer_activations(micro, policy, operations) for policy in policies]
    parts += [stage_inputs(micro)] * first + [stage_outputs(micro)] * last
    for part in parts:
        for name, size in part.items():
            kept[name] = kept.get(name, 0) + size
    kept["rotary tables"] = rotary_tables_bytes(micro)
    if max(micro.config.dropout, micro.config.attention_dropout) > 0:
        kept["indices"] = kept.get("indices", 0) + 8 * micro.batch  # of the samples, from which masks follow
    return {name: size for name, size in kept.items() if size}


def deferred_bytes(micro: Microbatch, layers: int) -> int:
    """What a stage keeps from I to W: inputs of its products and gradients of their outputs (Qi et al. 2023,
    arXiv:2401.10241, section 3: the memory of W is part of that of F)."""
    config, share, w = micro.config, micro.share, micro.itemsize
    heads = config.head_size * (2 * share.heads + 2 * share.kv_heads)
    columns = (3 if config.activation == "swiglu" else 2) * share.ffn
    whole = micro.tokens * (heads + columns + 2 * config.hidden_size) * w
    return layers * (whole + 2 * micro.residual)


def loss_working_bytes(micro: Microbatch) -> int:
    """What the backward pass of the loss holds beside its exponents: the wide gradient of the logits, and where they
    are narrow that in their format too: s b v (W + w). By chunks, c v in place of s b v, and the gradients of both
    operands: the weight's is summed in the wide format beside one chunk's."""
    vocabulary = micro.share.vocabulary
    if micro.chunked_loss:
        each = micro.itemsize + (micro.wide if micro.itemsize < micro.wide else 0)
        hidden = micro.config.hidden_size
        chunk = (chunk_rows(micro.tokens, vocabulary) + hidden) * vocabulary * each
        return chunk + micro.tokens * hidden * micro.itemsize
    logits = micro.tokens * vocabulary
    return logits * micro.wide + (logits * micro.itemsize if micro.itemsize < micro.wide else 0)


def layer_working_bytes(micro: Microbatch, policy: str = "none", operations: Collection[str] = ()) -> int:
    """The most that a layer's backward pass holds beyond what its forward pass kept: what it recomputes, and gradients
    on their way, less what it has let go by then.

    The heaviest of three moments: at the MLP's activation (gradients of its result and its operands), at the norms, at
    the attention core (gradients of its weights). Norms and activations hold wide values of a block of rows alone.
    """
    config, share, w = micro.config, micro.share, micro.itemsize
    whole = layer_activations(micro)
    kept = layer_activations(micro, policy, operations)
    rerun = 0
    if policy in ("full", "operations"):
        rerun = sum(size - kept.get(name, 0) for name, size in whole.items())
    hidden = micro.tokens * share.ffn * w
    residual = micro.residual
    # Three: gradients of the result, the gate and the up projection.
    activation = rerun + (3 if config.activation == "swiglu" else 2) * hidden + residual - hidden
    gone = hidden * (3 if config.activation == "swiglu" else 1 if config.activation == "relu" else 2) + residual
    norm = rerun - gone + 2 * residual
    core = attention_core(micro)
    if policy == "selective":
        rerun += sum(core.values()) - sum(attention_core_inputs(micro).values())
    # One more: the gradient of the weights; those from before dropout are let go as it is made.
    square = share.heads * micro.length * micro.tokens * w if micro.unfused else 0
    operands = core["q, k and v"]
    attention = rerun - gone + max(operands, square)
    if config.parallel_residual:
        # The gradient of the sum waits beside that of the layer's input, which the MLP's norm does not let go.
        attention += 2 * residual
    return max(0, activation, norm, attention)
