"""What the kernels share: their dtypes, blocks and tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS_A_THREAD = 32
"""Of one operand that a thread holds: with more, a kernel of several operands spills its registers."""


def tuned(
    kernel: Any,
    configurations: Sequence[triton.Config],
    key: Sequence[str],
    interpreted: Mapping[str, int],
    restored: Sequence[str] = (),
) -> Any:
    """``kernel`` under the configuration that is fastest for each value of the arguments ``key``.

    Args:
        configurations: block sizes, as ROWS or BLOCK, and warps; those that give a thread too much are left out.
        interpreted: the block sizes in the interpreter, where a program takes milliseconds whatever its size.
        restored: arguments that the kernel reads and overwrites: put back after each trial.
    """
    if triton.knobs.runtime.interpret:
        return triton.autotune([triton.Config(dict(interpreted))], list(key))(kernel)
    tune = triton.autotune(
        list(configurations),
        list(key),
        prune_configs_by={"early_config_prune": _fitting},
        restore_value=list(restored) or None,
    )
    return tune(kernel)


def _fitting(configurations: list[triton.Config], _: Mapping[str, Any], **given: Any) -> list[triton.Config]:
    def load(configuration: triton.Config) -> float:
        numbers = prod(configuration.kwargs.values()) * given.get("COLUMNS", 1)
        return numbers / (32 * configuration.num_warps)

    kept = [configuration for configuration in configurations if load(configuration) <= _NUMBERS_A_THREAD]
    return kept or [min(configurations, key=load)]


def row_configurations() -> list[triton.Config]:
    """For kernels that hold whole rows of COLUMNS numbers, ROWS of them at once."""
    choices = ((1, 4), (1, 8), (1, 16), (4, 4), (4, 8), (16, 4), (16, 8))
    return [triton.Config({"ROWS": rows}, num_warps=warps) for rows, warps in choices]


def flat_configurations() -> list[triton.Config]:
    """For elementwise kernels over BLOCK numbers."""
    return [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((1024, 4), (2048, 4), (4096, 8))]


def flat_grid(numbers: int) -> Callable[[Mapping[str, int]], tuple[int]]:
    """As many programs as blocks of BLOCK numbers."""
    return lambda meta: (triton.cdiv(numbers, meta["BLOCK"]),)


def wide_type(dtype: torch.dtype) -> tl.dtype:
    """What a kernel computes in: float32, or the dtype of the data where that is wider."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def rows_of(x: Tensor) -> Tensor:
    """(rows, columns) with neighbouring columns next to each other in memory; a copy only where they are not."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1]) if x.ndim else x.reshape(1, 1)
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def processors(x: Tensor) -> int:
    """Multiprocessors of the device, over which a kernel that sums over rows spreads; one without a device."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
