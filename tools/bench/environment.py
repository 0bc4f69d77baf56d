"""What a benchmark's figures were measured on."""

from __future__ import annotations

import os
import platform
from typing import Any


def describe_environment() -> dict[str, Any]:
    """Processor, cores, memory, versions: nothing that names a person or a machine."""
    import importlib.metadata

    import torch

    from gridtron.core.capabilities import find_capabilities

    versions: dict[str, str | None] = {}
    for package in ("torch", "triton", "megatron-core", "transformers", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    found = find_capabilities()
    return {
        "processor": _processor(),
        "cores": found.cpu_cores,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "devices": list(found.cuda_devices),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
