"""Architectures: a model's file holds its mathematics."""

from typing import Any

from gridtron.models.config import GPTConfig

__all__ = ["GPT", "GPTConfig"]


def __getattr__(name: str) -> Any:
    # The config is read where torch is not needed: the command line's refusals.
    if name == "GPT":
        from gridtron.models.gpt import GPT

        return GPT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
