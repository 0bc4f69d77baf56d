"""This GPT and its peers on the same work: equal weights, equal tokens, the same optimizer, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gridtron.core.grid import Grid
from gridtron.models import GPT, GPTConfig
from gridtron.models.compiled import compile_layers
from gridtron.parallel import DataParallel, load_full_state_dict
from gridtron.tools.bench.measure import Contender
from gridtron.tools.bench.plain import PlainGPT, Shape, adamw, mean_loss, plain_model, tokens_of


def our_names(shape: Shape) -> dict[str, str]:
    """Names of this GPT's parameters -> those of the plain module."""
    names = {"embedding.weight": "tok.weight", "final_norm.weight": "norm.weight", "head.weight": "head.weight"}
    parts = {
        "attention_norm": "n1", "mlp_norm": "n2", "attention.q": "attn.wq", "attention.k": "attn.wk",
        "attention.v": "attn.wv", "attention.out": "attn.wo", "mlp.gate": "mlp.w1", "mlp.up": "mlp.w3",
        "mlp.down": "mlp.w2",
    }  # fmt: skip
    for layer in range(shape.layers):
        for ours, theirs in parts.items():
            names[f"blocks.{layer}.{ours}.weight"] = f"layers.{layer}.{theirs}.weight"
    return names


def _runner(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    optimizers: list[torch.optim.Optimizer],
    before_step: Callable[[], object] = lambda: None,
) -> Callable[[int, Shape], float]:
    def step(index: int, shape: Shape) -> float:
        loss = loss_of(*tokens_of(shape, index))
        loss.backward()
        before_step()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        whole = loss.detach()
        return float(whole.full_tensor() if hasattr(whole, "full_tensor") else whole)

    return step


def our_config(shape: Shape) -> GPTConfig:
    """The shape as this GPT's."""
    return GPTConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        ffn_hidden_size=shape.ffn,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.sequence,
        norm_eps=shape.eps,
        rope_theta=shape.theta,
    )


def ours(shape: Shape, grid: Grid, sequence_parallel: bool = False, compiled: bool = False) -> Contender:
    """This GPT over the grid's tensor axis; ``compiled`` as under train.compile."""
    model = GPT(our_config(shape), grid, seed=0, sequence_parallel=sequence_parallel)
    state = plain_model(shape).state_dict()
    load_full_state_dict(model, {name: state[theirs] for name, theirs in our_names(shape).items()})
    if compiled:
        compile_layers(model)
    wrapped = DataParallel(model)
    count = shape.batch * shape.sequence

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return wrapped(tokens, targets).sum() / count

    step = _runner(loss_of, [adamw(model.parameters(), shape)], wrapped.finish_step)
    name = f"gridtron{' compiled' * compiled}{' sequence' * sequence_parallel}"
    return Contender(name, lambda index: step(index, shape))


def plain(shape: Shape) -> Contender:
    """The plain module in one process."""
    model = plain_model(shape)
    step = _runner(lambda x, y: mean_loss(model(x), y), [adamw(model.parameters(), shape)])
    return Contender("plain module", lambda index: step(index, shape))


def huggingface(shape: Shape) -> Contender:
    """transformers' Llama with SDPA in one process."""
    model = huggingface_model(shape, torch.float32)
    model.load_state_dict(huggingface_state(plain_model(shape), shape))
    step = _runner(lambda x, y: mean_loss(model(x).logits, y), [adamw(model.parameters(), shape)])
    return Contender("Hugging Face", lambda index: step(index, shape))


def huggingface_model(shape: Shape, dtype: torch.dtype) -> Any:
    """transformers' Llama of the shape with weights of its own; its rotary tables stay wide whatever the dtype."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.sequence,
        rms_norm_eps=shape.eps,
        rope_theta=shape.theta,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def huggingface_state(model: PlainGPT, shape: Shape) -> dict[str, Tensor]:
    """The plain module's weights by the names of transformers."""
    state = model.state_dict()
    renamed = {
        "model.embed_tokens.weight": state["tok.weight"],
        "model.norm.weight": state["norm.weight"],
        "lm_head.weight": state["head.weight"],
    }
    parts = {
        "n1": "input_layernorm", "n2": "post_attention_layernorm", "attn.wq": "self_attn.q_proj",
        "attn.wk": "self_attn.k_proj", "attn.wv": "self_attn.v_proj", "attn.wo": "self_attn.o_proj",
        "mlp.w1": "mlp.gate_proj", "mlp.w3": "mlp.up_proj", "mlp.w2": "mlp.down_proj",
    }  # fmt: skip
    for layer in range(shape.layers):
        for plain_name, name in parts.items():
            renamed[f"model.layers.{layer}.{name}.weight"] = state[f"layers.{layer}.{plain_name}.weight"]
    return renamed


def dtensor(shape: Shape, sequence_parallel: bool = False) -> Contender:
    """The plain module by torch's parallelize_module over all ranks, with loss parallelism."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    model = plain_model(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    top, layer = _dtensor_plans(sequence_parallel)
    parallelize_module(model, mesh, top)
    for block in model.layers.values():
        parallelize_module(block, mesh, layer)
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    # The fused update does not take both kinds in one call.
    optimizers = [adamw(parameters, shape) for parameters in (split, whole) if parameters]

    def step(index: int) -> float:
        tokens, targets = tokens_of(shape, index)
        with loss_parallel():
            loss = mean_loss(model(tokens), targets)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        detached = loss.detach()
        return float(detached.full_tensor() if isinstance(detached, DTensor) else detached)

    return Contender("DTensor" + (" sequence" if sequence_parallel else ""), step)


def _dtensor_plans(sequence_parallel: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    residual = Shard(1) if sequence_parallel else Replicate()
    top: dict[str, Any] = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        "head": ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1), use_local_output=False),
    }
    layer: dict[str, Any] = {
        **{name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.w1", "mlp.w3")},
        **{name: RowwiseParallel(output_layouts=residual) for name in ("attn.wo", "mlp.w2")},
    }
    if sequence_parallel:
        whole = Replicate()
        top["norm"] = SequenceParallel()
        layer |= {
            "n1": SequenceParallel(),
            "n2": SequenceParallel(),
            "attn": PrepareModuleInput(input_layouts=(residual, None), desired_input_layouts=(whole, None)),
            "mlp": PrepareModuleInput(input_layouts=(residual,), desired_input_layouts=(whole,)),
        }
    return top, layer
