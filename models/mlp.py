"""The feed-forward block: gated (SwiGLU) or plain (GELU, ReLU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gridtron.core.kernels.swiglu import swiglu
from gridtron.models.config import GPTConfig
from gridtron.parallel import TensorParallelLinear
from gridtron.parallel.linear import column_linear

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    # GPT-2's: the tanh form of Hendrycks and Gimpel 2016, arXiv:1606.08415.
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """``(..., hidden) -> (..., hidden)``; with sequence_parallel the first dimension is split."""

    def __init__(self, config: GPTConfig, linear: dict[str, Any]):
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_size
        self.activation = config.activation
        gated = self.activation == "swiglu"
        up = {"partition": "column", "bias": config.feed_forward_bias, **linear}
        self.gate = TensorParallelLinear(hidden, ffn, **up) if gated else None
        self.up = TensorParallelLinear(hidden, ffn, **up)
        self.down = TensorParallelLinear(ffn, hidden, partition="row", bias=config.feed_forward_bias, **linear)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        if self.gate is None:
            return self.down(_ACTIVATIONS[self.activation](self.up(x)))
        layers = [(layer.weight, layer.bias) for layer in (self.gate, self.up)]
        gate, up = column_linear(x, layers, self.up.axis, self.up.sequence_parallel, self.up.overlap)
        return self.down(swiglu(gate, up))
