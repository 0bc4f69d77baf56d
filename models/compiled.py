"""Layers compiled by torch.compile, one graph each, without a break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gridtron.core.torch_compat import compile_graph, sees_every_operator
from gridtron.models.block import Block
from gridtron.models.gpt import GPT


def compile_layers(model: GPT, backend: str | Callable[..., Any] = "inductor") -> GPT:
    """Compiles every decoder layer of ``model`` at its first call, in place; returned for chaining.

    Layers that are alike share one compilation; another shape, evaluation and a change of what is trained compile
    again. A break of the graph is an error. Embedding and head stay as they are, and so do all names of parameters.
    Inside of a compiled layer ``overlap`` is off and no weight gradient waits for a W (schedules that split the
    backward pass run, and gain nothing). Under a Ledger, or another mode that sees every operator, layers run
    uncompiled.

    Args:
        model: not under a list of ``recompute`` operations; with dropout it must be given a SampleContext, as an engine
            does.
        backend: of torch.compile.

    Raises:
        ValueError: a list of operations is recomputed: a compiled graph does not show the operators by name.
    """
    if "operations" in model.policies:
        raise ValueError(
            f"recompute operations={list(model.recompute.operations or ())}: a list does not go with compiled layers, "
            'which do not show their operators; give mode "full", or "selective" without a list'
        )
    graph = compile_graph(Block.forward, backend)
    for block in model.blocks.values():
        # Of the instance: hooks around the layer (FSDP2's) stay outside of the graph.
        block.forward = _Layer(graph, block)
    return model


class _Layer:
    """The forward of one layer."""

    def __init__(self, graph: Callable[..., Tensor], block: Any):
        self.graph, self.block = graph, block

    def __call__(self, *arguments: Any) -> Tensor:
        run = Block.forward if sees_every_operator() else self.graph
        return run(self.block, *arguments)
