"""Hugging Face's weights in and out: GPT-2, Llama, Mistral, Qwen2 and GPT-NeoX.

``families`` is the one table of names and layouts; reading, writing and both ways of the settings follow from it.
"""

from typing import TYPE_CHECKING, Any

from gridtron.models.huggingface.settings import config_from_huggingface, config_to_huggingface, read_config

if TYPE_CHECKING:
    from gridtron.models.huggingface.reading import load_huggingface
    from gridtron.models.huggingface.writing import save_huggingface

__all__ = ["config_from_huggingface", "config_to_huggingface", "load_huggingface", "read_config", "save_huggingface"]

_LATER = {
    "load_huggingface": "gridtron.models.huggingface.reading",
    "save_huggingface": "gridtron.models.huggingface.writing",
}


def __getattr__(name: str) -> Any:
    # Settings are read where torch is not needed: the command line's refusals.
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
