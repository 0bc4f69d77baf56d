"""Angles of rotary positions, with the kinds of scaling that stretch a trained context."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gridtron.models.config import GPTConfig


def rotary_frequencies(config: GPTConfig, length: int) -> tuple[Float[Tensor, "half"], float]:
    """Angle per position of each pair, in float64, and the factor on cosines and sines.

    Args:
        config: rope_theta, rotary_fraction (how much of a head turns; Black et al. 2022, arXiv:2204.06745, section
            2.1.1) and rope_scaling: ``linear`` (Chen et al. 2023, arXiv:2306.15595), ``dynamic`` (NTK-aware, by the
            length at hand), ``llama3`` (Llama 3.1: long wavelengths slowed, short kept, a ramp between) and ``yarn``
            (Peng et al. 2023, arXiv:2309.00071).
        length: positions in use; only ``dynamic`` depends on it.
    """
    width = config.rotary_size
    scaling: dict[str, Any] = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = float(scaling.get("factor", 1.0))
    theta = float(config.rope_theta)
    if kind == "dynamic":
        known = config.max_position_embeddings
        used = max(length, known)
        theta *= (factor * used / known - (factor - 1)) ** (width / (width - 2))
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    frequencies = theta**-exponents
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(frequencies, scaling, config)
    return frequencies, 1.0


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    # Fewer turns than ``low`` in the trained context: slowed in full; more than ``high``: kept.
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / float(scaling["factor"]))


def _yarn(frequencies: Tensor, scaling: dict[str, Any], config: GPTConfig) -> tuple[Tensor, float]:
    width, theta = config.rotary_size, float(config.rope_theta)
    trained = float(scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
    factor = float(scaling["factor"])

    def pair_of(turns: float) -> float:
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(pair_of(float(scaling.get("beta_fast") or 32)), 0.0)
    high = min(pair_of(float(scaling.get("beta_slow") or 1)), width - 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    pairs = torch.arange(len(frequencies), dtype=torch.float64)
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return frequencies * (1 - slowed) + frequencies / factor * slowed, float(attention)


def rotary_tables(
    config: GPTConfig, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "length half"], Float[Tensor, "length half"]]:
    """Cosines and sines of every position and pair; computed in float64, since float32 angles drift at long range."""
    frequencies, factor = rotary_frequencies(config, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)
