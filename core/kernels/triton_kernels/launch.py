"""What the kernels share: their dtypes, blocks and tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gridtron.core.precision import wide_dtype


def tuned(
    kernel: Any,
    configurations: Sequence[triton.Config],
    key: Sequence[str],
    interpreted: Mapping[str, int],
    restored: Sequence[str] = (),
) -> Any:
    """``kernel`` under the configuration that is fastest for each value of the arguments ``key``.

    For elementwise kernels alone, whose numbers no configuration changes: what is fastest differs between ranks and
    between runs, and replicas must stay equal and a resumed run the same, to the bit.

    Args:
        configurations: block sizes and warps.
        interpreted: the block sizes in the interpreter, where a program takes milliseconds whatever its size.
        restored: arguments that the kernel reads and overwrites: put back after each trial.
    """
    if triton.knobs.runtime.interpret:
        return triton.autotune([triton.Config(dict(interpreted))], list(key))(kernel)
    return triton.autotune(list(configurations), list(key), restore_value=list(restored) or None)(kernel)


def ruled(kernel: Any, rule: Callable[[int], Mapping[str, int]], interpreted: Mapping[str, int]) -> Any:
    """``kernel`` with block sizes and warps that follow from its argument ``columns``: for kernels that sum, where they
    settle the order.

    Args:
        rule: columns -> block sizes and ``num_warps``.
        interpreted: the block sizes in the interpreter.
    """
    if triton.knobs.runtime.interpret:
        return triton.heuristics({name: _constant(size) for name, size in interpreted.items()})(kernel)
    return triton.heuristics({name: _by_columns(rule, name) for name in rule(1)})(kernel)


def _constant(size: int) -> Callable[[Mapping[str, Any]], int]:
    return lambda given: size


def _by_columns(rule: Callable[[int], Mapping[str, int]], name: str) -> Callable[[Mapping[str, Any]], int]:
    return lambda given: rule(given["columns"])[name]


def row_rule(columns: int) -> dict[str, int]:
    """For kernels that hold whole rows: short ones together, sixteen numbers of an operand a thread."""
    block = triton.next_power_of_2(max(1, columns))
    rows = max(1, 2048 // block)
    return {"ROWS": rows, "num_warps": min(32, max(4, rows * block // 512))}


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


def partial_sums(x: Tensor, programs: int, needed: bool) -> Tensor:
    """(programs, columns of x) in the wide dtype, a row of which each program writes; none where no sum is needed."""
    make = torch.empty if x.numel() else torch.zeros
    return make((programs if needed else 0, x.shape[-1]), dtype=wide_dtype(x.dtype), device=x.device)


def processors(x: Tensor) -> int:
    """Multiprocessors of the device, over which a kernel that sums over rows spreads; one without a device."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
