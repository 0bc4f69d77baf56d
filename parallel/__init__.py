"""How work is partitioned over an axis: layers, losses, wrappers. Each part works alone, in anybody's module."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gridtron.parallel.clipping import clip_gradients
    from gridtron.parallel.data_parallel.wrapper import DataParallel
    from gridtron.parallel.dropout import Dropout, SampleContext
    from gridtron.parallel.embedding import VocabParallelEmbedding
    from gridtron.parallel.linear import TensorParallelLinear
    from gridtron.parallel.linear_loss import vocab_parallel_linear_cross_entropy
    from gridtron.parallel.loss import vocab_parallel_cross_entropy
    from gridtron.parallel.recompute import activation_checkpoint
    from gridtron.parallel.sequence import sequence_parallel_region
    from gridtron.parallel.state import full_state_dict, load_full_state_dict

__all__ = [
    "DataParallel",
    "Dropout",
    "SampleContext",
    "TensorParallelLinear",
    "VocabParallelEmbedding",
    "accumulate_gradient",
    "activation_checkpoint",
    "clip_gradients",
    "full_state_dict",
    "load_full_state_dict",
    "sequence_parallel_region",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]

# Taken from here when asked for: the command line reads the options of these modules without torch.
_MODULES = {
    "DataParallel": "gridtron.parallel.data_parallel.wrapper",
    "Dropout": "gridtron.parallel.dropout",
    "SampleContext": "gridtron.parallel.dropout",
    "TensorParallelLinear": "gridtron.parallel.linear",
    "VocabParallelEmbedding": "gridtron.parallel.embedding",
    "accumulate_gradient": "gridtron.parallel.gradient_door",
    "activation_checkpoint": "gridtron.parallel.recompute",
    "clip_gradients": "gridtron.parallel.clipping",
    "full_state_dict": "gridtron.parallel.state",
    "load_full_state_dict": "gridtron.parallel.state",
    "sequence_parallel_region": "gridtron.parallel.sequence",
    "vocab_parallel_cross_entropy": "gridtron.parallel.loss",
    "vocab_parallel_linear_cross_entropy": "gridtron.parallel.linear_loss",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
