"""The feed-forward block: gated (SwiGLU) or plain (GELU, ReLU)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gridtron.core.kernels.backend import backend_of
from gridtron.core.kernels.bias_gelu import bias_gelu
from gridtron.core.kernels.config import KernelsConfig
from gridtron.core.kernels.swiglu import swiglu
from gridtron.models.config import GPTConfig
from gridtron.parallel import TensorParallelLinear
from gridtron.parallel.linear import column_linear

# GPT-2's is the tanh form of Hendrycks and Gimpel 2016, arXiv:1606.08415.
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


class MLP(nn.Module):
    """``(..., hidden) -> (..., hidden)``; with sequence_parallel the first dimension is split."""

    def __init__(self, config: GPTConfig, linear: dict[str, Any], kernels: KernelsConfig):
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_size
        self.activation = config.activation
        self.swiglu, self.bias_gelu = kernels.of("swiglu"), kernels.of("bias_gelu")
        gated = self.activation == "swiglu"
        up = {"partition": "column", "bias": config.feed_forward_bias, **linear}
        self.gate = TensorParallelLinear(hidden, ffn, **up) if gated else None
        self.up = TensorParallelLinear(hidden, ffn, **up)
        self.down = TensorParallelLinear(ffn, hidden, partition="row", bias=config.feed_forward_bias, **linear)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        if self.activation == "relu":
            return self.down(F.relu(self.up(x)))
        if self.gate is None:
            return self.down(self._gelu(x))
        layers = [(layer.weight, layer.bias) for layer in (self.gate, self.up)]
        gate, up = column_linear(x, layers, self.up.axis, self.up.sequence_parallel, self.up.overlap)
        return self.down(swiglu(gate, up, self.swiglu))

    def _gelu(self, x: Tensor) -> Tensor:
        bias = self.up.bias
        if bias is None or backend_of("bias_gelu", self.bias_gelu, x) == "torch":
            # A product adds its bias for nothing.
            return bias_gelu(self.up(x), None, _APPROXIMATE[self.activation], self.bias_gelu)
        layers = [(self.up.weight, None)]
        (up,) = column_linear(x, layers, self.up.axis, self.up.sequence_parallel, self.up.overlap)
        return bias_gelu(up, bias, _APPROXIMATE[self.activation], self.bias_gelu)
