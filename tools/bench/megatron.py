"""Megatron-core's GPT on the CPU with gloo: its own modules; the few names it takes from CUDA get a CPU's answer.

Its attention is unfused here (baddbmm and softmax), where this GPT and torch's peers use SDPA: say so beside any ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gridtron.tools.bench.measure import Contender
from gridtron.tools.bench.pipeline_contenders import share_from
from gridtron.tools.bench.plain import Shape, adamw, plain_model, tokens_of


class _OnCPU:
    """torch, whose zeros are on the CPU: Megatron's schedules ask for device="cuda" by name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*shape: Any, **options: Any) -> Tensor:
        return torch.zeros(*shape, **{**options, "device": "cpu"})


def _prepare_for_cpu() -> None:
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.synchronize = lambda *_, **__: None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    import megatron.core.pipeline_parallel.schedules as schedules
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    schedules.torch = _OnCPU()


class _RMSNorm:
    """Megatron's own wrapper refuses sequence parallelism; the weight is marked as its other norms mark theirs."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norm: Any = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


def megatron(
    shape: Shape,
    tensor: int,
    sequence_parallel: bool = False,
    *,
    pipeline: int = 1,
    chunks: int = 1,
    microbatches: int = 1,
) -> Contender:
    """Megatron-core's GPTModel over tensor and pipeline ranks; torch.distributed runs already.

    Its schedule is 1F1B, interleaved with several ``chunks`` a rank.
    """
    _prepare_for_cpu()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor, pipeline, chunks if chunks > 1 else None)
    model_parallel_cuda_manual_seed(shape.seed)
    parts = _loaded_models(shape, tensor, sequence_parallel, pipeline, chunks)
    parameters = [parameter for model in parts for parameter in model.parameters()]
    optimizer = adamw(parameters, shape)
    partial = [p for p in parameters if getattr(p, "sequence_parallel", False)] if sequence_parallel else []
    forward_step, forward_backward = _forward_step(shape), get_forward_backward_func()

    def step(index: int) -> float:
        tokens, targets = tokens_of(shape, index)
        batches = list(zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True))
        iterators = [iter(batches) for _ in parts]
        out = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iterators if chunks > 1 else iterators[0],
            model=parts if chunks > 1 else parts[0],
            num_microbatches=microbatches,
            seq_length=shape.sequence,
            micro_batch_size=shape.batch // microbatches,
            decoder_seq_length=shape.sequence,
            forward_only=False,
        )
        for parameter in partial:
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
        optimizer.step()
        optimizer.zero_grad()
        return sum(float(item["loss"]) for item in out) / len(out) if out else 0.0

    name = "Megatron-core" + (" sequence" if sequence_parallel else "") + (" interleaved" if chunks > 1 else "")
    return Contender(name, step, share_from(dist.get_world_size() - 1) if pipeline > 1 else float)


def _forward_step(shape: Shape) -> Callable[[Any, Any], Any]:
    mask = torch.triu(torch.ones(shape.sequence, shape.sequence, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(shape.sequence)[None]

    def loss_of(losses: Tensor) -> Any:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    def forward_step(batches: Any, chunk: Any) -> Any:
        tokens, targets = next(batches)
        return chunk(tokens, positions.expand(tokens.shape[0], -1), mask, labels=targets), loss_of

    return forward_step


def _loaded_models(shape: Shape, tensor: int, sequence_parallel: bool, pipeline: int, chunks: int) -> list[Any]:
    """This rank's chunks of layers, with the plain module's weights."""
    from megatron.core import parallel_state

    parts = _models(shape, tensor, sequence_parallel, pipeline, chunks)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    each = shape.layers // (pipeline * chunks)
    for chunk, model in enumerate(parts):
        first_layer = (chunk * pipeline + rank) * each
        _load(model, shape, parallel_state.get_tensor_model_parallel_rank(), tensor, first_layer)
    return parts


def _models(shape: Shape, tensor: int, sequence_parallel: bool, pipeline: int, chunks: int) -> list[Any]:
    import megatron.core.transformer.transformer_block as transformer_block
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.key_value_heads,
        normalization="RMSNorm",
        layernorm_epsilon=shape.eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if sequence_parallel:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _RMSNorm
        transformer_block.LayerNormImpl = _RMSNorm
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return [
        GPTModel(
            config,
            spec,
            shape.vocabulary,
            shape.sequence,
            pre_process=chunk == 0 and rank == 0,
            post_process=chunk == chunks - 1 and rank == pipeline - 1,
            parallel_output=True,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            rotary_base=int(shape.theta),
            **({"vp_stage": chunk} if chunks > 1 else {}),
        )
        for chunk in range(chunks)
    ]


@torch.no_grad()
def _load(model: Any, shape: Shape, rank: int, tensor: int, first_layer: int) -> None:
    reference: Any = plain_model(shape)
    groups, width = shape.key_value_heads, shape.hidden // shape.heads

    def rows(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(tensor, dim)[rank]

    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(rows(reference.tok.weight))
    for index, layer in enumerate(model.decoder.layers):
        block = reference.layers[str(first_layer + index)]
        q = block.attn.wq.weight.view(groups, -1, shape.hidden)
        k, v = (weight.view(groups, width, shape.hidden) for weight in (block.attn.wk.weight, block.attn.wv.weight))
        layer.self_attention.linear_qkv.weight.copy_(rows(torch.cat([q, k, v], 1).flatten(0, 1)))
        layer.self_attention.linear_proj.weight.copy_(rows(block.attn.wo.weight, 1))
        layer.mlp.linear_fc1.weight.copy_(torch.cat([rows(block.mlp.w1.weight), rows(block.mlp.w3.weight)]))
        layer.mlp.linear_fc2.weight.copy_(rows(block.mlp.w2.weight, 1))
    if model.post_process:
        model.output_layer.weight.copy_(rows(reference.head.weight))
