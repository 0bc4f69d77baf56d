"""One training step of a model of 1.3 billion parameters on one device, beside transformers and a compiled module."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gridtron.core.capabilities import Capabilities, peak_flops
from gridtron.core.grid import Grid
from gridtron.core.kernels.config import KernelsConfig, resolve
from gridtron.models.cost.flops import training_flops
from gridtron.tools.bench.contenders import huggingface_model, huggingface_state, our_config, our_names
from gridtron.tools.bench.gpu_clock import Budget
from gridtron.tools.bench.gpu_kernels import Compiler
from gridtron.tools.bench.plain import Block, PlainGPT, Shape, adamw, mean_loss, plain_model, tokens_of

LARGE = Shape(vocabulary=32000, hidden=2048, layers=24, heads=16, key_value_heads=16, ffn=5504, sequence=2048, lr=1e-4)
MFU = 0.6
"""Aimed at on an H200."""
_SAME_LOSS = 2e-2
"""Of first losses, in bfloat16: of about 10.4."""

Step = Callable[[int], float]


@dataclass(frozen=True)
class Setting:
    """Where and on what a step is measured.

    Args:
        shape: model and batch.
        grid: of one process, with the device.
        dtype: of the model.
        found: what the machine can.
        peers: whether transformers is there.
        compiler, backend: torch.compile, and what it compiles this project's layers with.
        steps, warmup: counted, and before them.
    """

    shape: Shape
    grid: Grid
    dtype: torch.dtype
    found: Capabilities
    peers: bool
    compiler: Compiler
    backend: str
    steps: int
    warmup: int


def measure_step(setting: Setting, budget: Budget) -> dict[str, Any]:
    """Seconds, tokens a second, MFU, peak memory and losses of each contender, one after another: together they would
    not have room; those that the budget leaves no time for are named."""
    shape, device = setting.shape, setting.grid.device
    tokens = shape.batch * shape.sequence
    flops = training_flops(our_config(shape), shape.sequence) * tokens
    peak = peak_flops(device, setting.dtype)
    rows: dict[str, Any] = {}
    for name, make in makers(setting).items():
        rows[name] = _measured(make, setting, budget)
        if seconds := rows[name].get("seconds"):
            rows[name] |= {"tokens_per_second": tokens / seconds, "mfu": flops / seconds / peak if peak else None}
    ours = rows["gridtron"]
    firsts = [row["losses"][0] for row in rows.values() if "losses" in row]
    return {
        "shape": vars(shape),
        "flops": flops,
        "peak_flops": peak,
        "contenders": rows,
        "equal_losses": max(firsts) - min(firsts) <= _SAME_LOSS if firsts else None,
        "target": MFU,
        "holds": ours["mfu"] >= MFU if ours.get("mfu") else None,
    }


def makers(setting: Setting) -> dict[str, Callable[[], Step]]:
    """Name -> what makes a step; ours first. All start from the same weights and see the same tokens."""
    made: dict[str, Callable[[], Step]] = {"gridtron": lambda: _ours(setting, False)}
    made["plain module, compiled"] = lambda: _compiled(setting)
    if setting.peers:
        made["Hugging Face"] = lambda: _huggingface(setting)
    made["gridtron, compiled layers"] = lambda: _ours(setting, True)
    return made


def _measured(make: Callable[[], Step], setting: Setting, budget: Budget) -> dict[str, Any]:
    if budget.left <= 0:
        return {"skipped": "no time was left"}
    cuda = setting.grid.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    losses: list[float] = []
    seconds: list[float] = []
    try:
        step = make()
        if cuda:
            # What was drawn to begin with is not what a step holds.
            torch.cuda.reset_peak_memory_stats()
        for index in range(setting.warmup + setting.steps):
            if seconds and budget.left <= 0:
                break
            start = budget.now()
            losses.append(step(index))  # its value has been waited for
            if index >= setting.warmup:
                seconds.append(budget.now() - start)
    except Exception as fault:  # one contender that fails must not lose the figures of the others
        return {"failed": f"{type(fault).__name__}: {fault}".splitlines()[0]}
    finally:
        step = None  # type: ignore[assignment]
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    return {
        "seconds": statistics.median(seconds),
        "steps": len(seconds),
        "losses": [losses[0], losses[-1]],
        "peak_bytes": torch.cuda.max_memory_allocated() - before if cuda else None,
    }


def _on(setting: Setting) -> AbstractContextManager[Any]:
    return torch.device(setting.grid.device)


def _weights(setting: Setting) -> PlainGPT:
    """The same whenever it is called, drawn on the device."""
    with _on(setting):
        return plain_model(setting.shape).to(setting.dtype)


def _ours(setting: Setting, compiled: bool) -> Step:
    """As a run has it: main weights in float32, AdamW over them."""
    from gridtron.core.data.batch import Batch
    from gridtron.core.optim.config import OptimizerConfig
    from gridtron.models import GPT
    from gridtron.models.compiled import compile_layers
    from gridtron.parallel import load_full_state_dict
    from gridtron.parallel.engine import TrainingEngine

    shape, grid = setting.shape, setting.grid
    kernels = resolve(KernelsConfig(), setting.found)
    model = GPT(our_config(shape), grid, seed=0, kernels=kernels, device=grid.device, dtype=setting.dtype)
    state = _weights(setting).state_dict()
    load_full_state_dict(model, {name: state[theirs] for name, theirs in our_names(shape).items()})
    if compiled:
        compile_layers(model, setting.backend)
    optimizer = OptimizerConfig("adamw", lr=shape.lr, weight_decay=0.0, grad_clip=0.0)
    engine = TrainingEngine(model, grid, optimizer, adamw=kernels.of("adamw"))

    def step(index: int) -> float:
        loss = engine.forward_backward([Batch.of(*tokens_of(shape, index))]).loss
        engine.step(shape.lr)
        if grid.device.type == "cuda":
            torch.cuda.synchronize()
        return loss

    return step


def _compiled(setting: Setting) -> Step:
    """All layers by one compilation, the loss by another; AdamW on the narrow weights themselves."""
    model = _weights(setting)
    forward = setting.compiler(Block.forward)
    for block in model.layers.values():
        block.forward = partial(forward, block)
    loss = setting.compiler(mean_loss)
    return _peer_step(setting, model, lambda tokens, targets: loss(model(tokens), targets))


def _huggingface(setting: Setting) -> Step:
    with _on(setting):
        model = huggingface_model(setting.shape, setting.dtype)
    model.load_state_dict(huggingface_state(_weights(setting), setting.shape))
    return _peer_step(setting, model, lambda tokens, targets: mean_loss(model(tokens).logits, targets))


def _peer_step(setting: Setting, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    optimizer = adamw(model.parameters(), setting.shape)
    device = setting.grid.device

    def step(index: int) -> float:
        loss = loss_of(*(tensor.to(device) for tensor in tokens_of(setting.shape, index)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        if device.type == "cuda":
            torch.cuda.synchronize()
        return value

    return step
