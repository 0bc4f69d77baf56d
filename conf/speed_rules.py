"""What must fit together where a run is made faster: overlap of communication with products, compiled layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gridtron.conf.pipeline_rules import splits_backward
from gridtron.conf.schema import Plan
from gridtron.conf.values import Violation
from gridtron.core.kernels.config import AVAILABLE
from gridtron.models.config import GPTConfig


def overlap_violations(plan: Plan, devices: int) -> Iterator[Violation]:
    """What does not fit; ``devices`` are the CUDA devices of the machine."""
    overlap = plan.grid.overlap
    if overlap == "none":
        return
    if not plan.grid.sequence_parallel:
        yield Violation(
            f"grid.overlap={overlap}: has no effect with grid.sequence_parallel=false; set "
            "grid.sequence_parallel=true, or leave it out",
            {"grid.overlap", "grid.sequence_parallel"},
        )
    if overlap == "symmetric_memory" and devices == 0:
        yield Violation(
            "grid.overlap=symmetric_memory: it needs CUDA devices that reach each other's memory, and there is none "
            "here; nearest: grid.overlap=chunked",
            {"grid.overlap"},
        )


def kernels_violations(plan: Plan, own_model: bool) -> Iterator[Violation]:
    """Choices of kernels that the run would never come to.

    Args:
        plan: of the run.
        own_model: whether the layers are this project's GPT's.
    """
    chosen = plan.kernels
    unused: dict[str, str] = {}
    if "optimizer" in plan.parts or plan.optimizer.name == "sgd":
        unused["adamw"] = f"optimizer={plan.parts.get('optimizer') or plan.optimizer.name}"
    if own_model:
        unused |= _unused_of_model(plan.model, chosen.chunked_loss)
    else:
        unused |= dict.fromkeys([name for name in AVAILABLE if name != "adamw"], "a model of your own")
        if chosen.chunked_loss:
            yield Violation(
                "kernels.chunked_loss=true: has no effect with a model of your own, which makes its own loss "
                "(gridtron.parallel.vocab_parallel_linear_cross_entropy is for it); leave it out",
                {"kernels.chunked_loss", "model.build"},
            )
    for name, reason in unused.items():
        if getattr(chosen, name) is not None:
            key = f"kernels.{name}"
            yield Violation(f"{key}={getattr(chosen, name)}: has no effect with {reason}; leave it out", {key})


def _unused_of_model(model: GPTConfig, chunked_loss: bool) -> dict[str, str]:
    """Operation that the model has no use for -> why."""
    gelu = model.activation in ("gelu", "gelu_tanh")
    needs = {
        "rms_norm": (model.normalization == "rms_norm", f"model.normalization={model.normalization}"),
        "layer_norm": (model.normalization == "layer_norm", f"model.normalization={model.normalization}"),
        "rope": (model.position == "rotary", f"model.position={model.position}"),
        "swiglu": (model.activation == "swiglu", f"model.activation={model.activation}"),
        "bias_gelu": (gelu, f"model.activation={model.activation}"),
        "scaled_masked_softmax": (model.attention_dropout > 0, "model.attention_dropout=0"),
        "dropout_add": (max(model.dropout, model.attention_dropout) > 0, "model.dropout=0"),
        "cross_entropy": (not chunked_loss, "kernels.chunked_loss=true"),
        "linear_cross_entropy": (chunked_loss, "kernels.chunked_loss=false"),
    }
    return {name: reason for name, (used, reason) in needs.items() if not used}


def compile_violations(
    plan: Plan, sizes: Mapping[str, int], own_model: bool, compiler_fault: str | None
) -> Iterator[Violation]:
    """What does not fit.

    Args:
        plan: of the run.
        sizes: of the grid's axes.
        own_model: whether the layers are this project's GPT's.
        compiler_fault: why nothing can be compiled on this machine.
    """
    if not plan.train.compile:
        return
    if compiler_fault is not None:
        yield Violation(f"train.compile=true: {compiler_fault}; nearest: train.compile=false", {"train.compile"})
    if not own_model:
        yield Violation(
            "train.compile=true: the layers of a model of your own are not known; nearest: train.compile=false, and "
            "torch.compile of its layers in its builder",
            {"train.compile", "model.build"},
        )
    apex = [name for name in ("rms_norm", "layer_norm", "scaled_masked_softmax") if plan.kernels.of(name) == "apex"]
    if apex:
        yield Violation(
            f"train.compile=true: apex's {', '.join(apex)} cannot be trusted to become part of a graph; nearest: "
            f"{', '.join(f'kernels.{name}=auto' for name in apex)}",
            {"train.compile", "kernels.backend", *(f"kernels.{name}" for name in apex)},
        )
    recompute = plan.recompute
    if recompute.operations is not None and recompute.mode == "selective":
        yield Violation(
            f"recompute.operations=[{','.join(recompute.operations)}] with train.compile=true: a compiled layer does "
            "not show its operators; nearest: recompute.operations=null (the attention core), or recompute.mode=full",
            {"train.compile", "recompute.operations"},
        )
    if recompute.mode == "auto":
        yield Violation(
            "recompute.mode=auto with train.compile=true: it chooses by the memory of layers that are not compiled; "
            "nearest: recompute.mode=selective, or recompute.mode=full",
            {"train.compile", "recompute.mode"},
        )
    if splits_backward(plan, sizes):
        yield Violation(
            f"pipeline.schedule={plan.pipeline.schedule} with train.compile=true: a compiled layer's weight gradients "
            "come with its input's, so that a schedule that splits them gains nothing; nearest: "
            "pipeline.schedule=1f1b, or train.compile=false",
            {"train.compile", "pipeline.schedule"},
        )
