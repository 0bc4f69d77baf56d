"""Number formats of a run, and the loss scale that float16 needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gridtron.core.options import option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMATS: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""A format's name in options -> torch's."""
LOWEST_SCALE = 1.0
"""Of a loss: a gradient that is not finite even so is not finite, and no scale would mend it."""
HIGHEST_SCALE = 2.0**32
"""Where no gradient overflows (all are zero), a scale would double for ever."""


@dataclass(frozen=True)
class PrecisionConfig:
    mode: str = option(
        "auto",
        "of weights and activations, with main weights and gradients in fp32 beside bf16 and fp16; auto: bf16 on a GPU "
        "that has it, else fp32",
        choices=("auto", *FORMATS),
    )
    loss_scale: float = option(
        65536.0,
        "fp16: by what the loss is multiplied before the backward pass, at the start; a power of two",
        minimum=LOWEST_SCALE,
        maximum=HIGHEST_SCALE,
    )
    loss_scale_interval: int = option(
        2000,
        "fp16: steps without overflow after which the scale doubles (an overflow halves it); 0: it is constant",
        minimum=0,
    )


def parameter_dtype(mode: str, device: torch.device) -> torch.dtype:
    """The dtype of parameters and activations under ``mode`` on ``device``."""
    import torch

    if mode == "auto":
        mode = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return dtype_named(mode)


def dtype_named(name: str) -> torch.dtype:
    """The dtype of one of FORMATS."""
    import torch

    dtype: torch.dtype = getattr(torch, FORMATS[name])
    return dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where gradients accumulate, losses and norms compute: float32, or ``dtype`` if that is wider."""
    import torch

    return torch.promote_types(dtype, torch.float32)


class LossScaler:
    """By what losses are multiplied so that gradients in float16 do not vanish (Micikevicius et al. 2018,
    arXiv:1710.03740, section 3.2), searched while a run goes on: it halves with every step whose gradients overflow,
    and doubles after ``interval`` steps in a row without.

    It sees one fact a step, which all ranks agree on, so that all have the same scale. A scale is a power of two: the
    gradients of a scaled loss, unscaled, differ from the others in no digit.

    Args:
        scale: at the start; between 1 and 2^32.
        interval: steps without overflow until it doubles; 0: the scale is constant.

    Attributes:
        scale: of the next step.
        good_steps: without overflow, since the scale last changed.
        skipped: steps with overflow, in all.

    Raises:
        ValueError: a scale that is no power of two, or out of bounds.
    """

    def __init__(self, scale: float = 65536.0, interval: int = 2000):
        if fault := loss_scale_fault(scale):
            raise ValueError(f"scale={scale:g}: {fault}")
        self.interval = interval
        self.scale = float(scale)
        self.good_steps = 0
        self.skipped = 0
        self._tensors: dict[str, Tensor] = {}

    @staticmethod
    def of(config: PrecisionConfig) -> LossScaler | None:
        """The one that a run needs; None in a wider format."""
        return LossScaler(config.loss_scale, config.loss_scale_interval) if config.mode == "fp16" else None

    def update(self, applied: bool) -> None:
        """After a step: whether the gradients were finite."""
        if not applied:
            self.skipped += 1
            self.good_steps = 0
            if self.interval:
                self.scale = max(self.scale / 2, LOWEST_SCALE)
            return
        self.good_steps += 1
        if self.interval and self.good_steps >= self.interval:
            self.scale = min(self.scale * 2, HIGHEST_SCALE)
            self.good_steps = 0

    def states(self) -> dict[str, Tensor]:
        """For a checkpoint: each number as a float64 scalar. Filled in place, they count from :meth:`take_states`."""
        import torch

        numbers = {"loss_scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}
        self._tensors = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
        return dict(self._tensors)

    def take_states(self) -> None:
        """Goes on with the numbers that the tensors of the last :meth:`states` now hold."""
        if self._tensors:
            self.scale = float(self._tensors["loss_scale"])
            self.good_steps = int(self._tensors["good_steps"])
            self.skipped = int(self._tensors["skipped"])


def loss_scale_fault(scale: float) -> str | None:
    """Why a loss cannot be scaled by this, with the nearest that it can be; None where it can."""
    if LOWEST_SCALE <= scale <= HIGHEST_SCALE and math.frexp(scale)[0] == 0.5:
        return None
    nearest = min(max(scale, LOWEST_SCALE), HIGHEST_SCALE)
    nearest = 2.0 ** round(math.log2(nearest)) if math.isfinite(nearest) else LOWEST_SCALE
    return (
        f"a loss scale is a power of two from {LOWEST_SCALE:g} to 2^{math.log2(HIGHEST_SCALE):.0f}, so that it changes "
        f"no digit of a gradient; nearest: {nearest:.0f}"
    )


def searches_scale(config: PrecisionConfig) -> bool:
    """Whether steps whose gradients overflow are a search for the loss scale, above the lowest, and no fault."""
    return config.mode == "fp16" and config.loss_scale_interval > 0
