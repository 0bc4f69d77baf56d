"""Activation checkpointing: what is recomputed in the backward pass instead of kept (Korthikanti et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class RecomputeConfig:
    mode: str = option(
        "none", "what is recomputed: nothing, the attention core, or whole layers", choices=("none", "selective", "full")
    )
    layers: int | None = option(None, "full: only the first so many layers; null: all", minimum=0)
