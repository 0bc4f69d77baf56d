"""What the kernels share: their dtypes, blocks and tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAXIMUM_BLOCK = 65536
"""Numbers of one row that a program holds at once: above, registers spill."""


def tuned(kernel: Any, configurations: Sequence[triton.Config], key: Sequence[str]) -> Any:
    """``kernel`` under the configuration that is fastest for each value of the arguments ``key``.

    The interpreter has no clock that matters and takes milliseconds a program: there the last configuration is taken,
    which is the one with most rows a program.
    """
    if triton.knobs.runtime.interpret:
        configurations = configurations[-1:]
    return triton.autotune(list(configurations), list(key))(kernel)


def wide_type(dtype: torch.dtype) -> tl.dtype:
    """What a kernel computes in: float32, or the dtype of the data where that is wider."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def rows_of(x: Tensor) -> Tensor:
    """(rows, columns) with neighbouring columns next to each other in memory; a copy only where they are not."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def processors(x: Tensor) -> int:
    """Multiprocessors of the device, over which a kernel that sums over rows spreads; one without a device."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
