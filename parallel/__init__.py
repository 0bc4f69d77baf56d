"""How work is partitioned over an axis: layers, losses, wrappers. Each part works alone, in anybody's module."""

from gridtron.parallel.data_parallel.wrapper import DataParallel, accumulate_gradient
from gridtron.parallel.dropout import Dropout, SampleContext
from gridtron.parallel.embedding import VocabParallelEmbedding
from gridtron.parallel.linear import TensorParallelLinear
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
    "full_state_dict",
    "load_full_state_dict",
    "sequence_parallel_region",
    "vocab_parallel_cross_entropy",
]
