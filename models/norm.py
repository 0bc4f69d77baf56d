"""The two norms of the decoder, as modules."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gridtron.core.grid import Axis
from gridtron.core.kernels.config import KernelsConfig
from gridtron.core.kernels.layer_norm import layer_norm
from gridtron.core.kernels.rms_norm import rms_norm
from gridtron.models.config import GPTConfig
from gridtron.parallel.sequence import sequence_parallel_region


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension."""

    def __init__(
        self,
        size: int,
        eps: float,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        self.eps, self.backend = eps, backend
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return rms_norm(x, self.weight, self.eps, self.backend)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class LayerNorm(nn.Module):
    """``(x - mean) / std * weight + bias`` over the last dimension (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(
        self,
        size: int,
        eps: float,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        self.eps, self.backend = eps, backend
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return layer_norm(x, self.weight, self.bias, self.eps, self.backend)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}, bias={self.bias is not None}"


def build_norm(
    config: GPTConfig,
    axis: Axis,
    sequence_parallel: bool,
    device: torch.device | None,
    dtype: torch.dtype | None,
    kernels: KernelsConfig,
) -> nn.Module:
    """The configured norm; in a sequence-parallel region its weight's gradient is partial."""
    norm: nn.Module
    if config.normalization == "rms_norm":
        norm = RMSNorm(config.hidden_size, config.norm_eps, device, dtype, kernels.of("rms_norm"))
    else:
        norm = LayerNorm(config.hidden_size, config.norm_eps, config.bias, device, dtype, kernels.of("layer_norm"))
    return sequence_parallel_region(norm, axis) if sequence_parallel else norm
