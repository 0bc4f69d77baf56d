"""What this machine can do: found once at an entry point, handed on as a value."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Dense matrix rates of the makers' data sheets, in FLOP/s: (name as the driver gives it, bf16 and fp16, fp32 with
# tensor cores off, fp64 with tensor cores). The first name that occurs in the device's is taken.
_PEAK_RATES: tuple[tuple[str, float, float, float], ...] = (
    ("B200", 2250e12, 75e12, 37e12),
    ("H200", 989e12, 67e12, 67e12),
    ("H100 PCIe", 756e12, 51e12, 51e12),
    ("H100 NVL", 835e12, 60e12, 60e12),
    ("H100", 989e12, 67e12, 67e12),
    ("A100", 312e12, 19.5e12, 19.5e12),
    ("L40S", 362e12, 91.6e12, 1.4e12),
    ("V100", 125e12, 15.7e12, 7.8e12),
)


@dataclass(frozen=True)
class Capabilities:
    """Devices and optional libraries.

    Args:
        cpu_cores: that this process may use.
        cuda_devices: names of the CUDA devices, empty without any.
        bf16: whether the first CUDA device computes in bf16.
        nccl: whether torch was built with NCCL.
        triton: version, or None.
        apex: "nvidia" (built from NVIDIA's source), "other" (PyPI's unrelated package of that name), or None.
        triton_interpreted: Triton's kernels run in its interpreter, on the CPU (TRITON_INTERPRET=1): slow, for tests.
    """

    cpu_cores: int
    cuda_devices: tuple[str, ...]
    bf16: bool
    nccl: bool
    triton: str | None
    apex: str | None
    triton_interpreted: bool = False


def find_libraries(devices: int, environment: Mapping[str, str]) -> Capabilities:
    """What of it can be told without torch: ``devices`` counted by the caller, and which libraries lie there."""
    return Capabilities(
        cpu_cores=usable_cores(),
        cuda_devices=("CUDA",) * devices,
        bf16=False,
        nccl=False,
        triton=_version("triton"),
        apex=find_apex(),
        triton_interpreted=environment.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"),
    )


def usable_cores() -> int:
    """Processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def find_capabilities(environment: Mapping[str, str] | None = None) -> Capabilities:
    """Looks at this machine; imports neither Triton nor apex.

    Args:
        environment: ``os.environ`` of an entry point; None: nothing in it counts.
    """
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())) if cuda else ()
    return replace(
        find_libraries(len(names), environment or {}),
        cuda_devices=names,
        bf16=cuda and torch.cuda.is_bf16_supported(),
        nccl=dist.is_available() and dist.is_nccl_available(),
    )


def find_apex() -> str | None:
    """Which ``apex`` an import would find, without importing it: NVIDIA's has fused normalisation and optimizers."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    from pathlib import Path

    nvidia = any(Path(folder, "normalization").is_dir() and Path(folder, "optimizers").is_dir() for folder in folders)
    return "nvidia" if nvidia else "other"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense matrix rate of a device in FLOP/s by its maker's data sheet; None where it is not known (any CPU)."""
    import torch

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known, half, single, double in _PEAK_RATES:
        if known in name:
            return {torch.float32: single, torch.float64: double}.get(dtype, half)
    return None
