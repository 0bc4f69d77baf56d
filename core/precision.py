"""Number formats of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gridtron.core.options import option

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PrecisionConfig:
    mode: str = option("auto", "auto: bf16 on a GPU that has it, else fp32", choices=("auto", "fp32", "bf16", "fp64"))


def parameter_dtype(mode: str, device: torch.device) -> torch.dtype:
    """The dtype of parameters and activations under ``mode`` on ``device``."""
    import torch

    if mode == "auto":
        mode = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[mode]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where gradients accumulate, losses and norms compute: float32, or ``dtype`` if that is wider."""
    import torch

    return torch.promote_types(dtype, torch.float32)
