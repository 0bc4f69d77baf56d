"""Compiles what the launchers would launch, without a device: ``python ahead_of_time.py 80,90 ends|all CALL...``

Prints a JSON line a compiled kernel. A process of its own: the compiler and the interpreter need their own each.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parent))
from calls import CALLS, inputs_of, results

# Block sizes of kernels that sum over rows follow from their length.
OTHER_WIDTHS = (96, 1000, 16384)
RULED = ("rms_norm", "layer_norm", "bias_gelu", "scaled_masked_softmax", "cross_entropy")


class Driver:
    """A device of a compute capability that is not there; kernels are kept by the number of the device."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda


def spilled(ptx: str, capability: int) -> int:
    """Bytes that ptxas spills."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        target = "sm_90a" if capability == 90 else f"sm_{capability}"
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target}", str(source), "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", told))


def widest(ptx: str) -> int:
    """Bytes of the widest read of memory."""
    widths = [
        int(count or 1) * int(bits) // 8 for count, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    ]
    return max(widths, default=0)


def instead(report: Callable[..., None], every: bool) -> None:
    """Launches become compilations; tuning becomes all configurations, or the first and the last."""
    launch = JITFunction.run

    def compile_alone(self: Any, *arguments: Any, **options: Any) -> Any:
        options.pop("warmup", None)
        compiled = launch(self, *arguments, warmup=True, **options)
        report(self.__name__, compiled)
        return compiled

    def configurations(self: Any, *arguments: Any, **options: Any) -> None:
        self.nargs = dict(zip(self.arg_names, arguments, strict=False))
        fitting = self.prune_configs(options)
        for configuration in fitting if every else {id(one): one for one in (fitting[0], fitting[-1])}.values():
            self.fn.run(*arguments, **{**options, **configuration.all_kwargs()})

    JITFunction.run = compile_alone  # type: ignore[method-assign]
    Autotuner.run = configurations  # type: ignore[method-assign]


def one_each() -> list[str]:
    """The first call of each operation: the others' kernels differ by a flag."""
    return list({call.operation: name for name, call in reversed(CALLS.items())}.values())


def main() -> None:
    capabilities, extent, *names = sys.argv[1:]
    now: dict[str, Any] = {}
    seen: set[tuple[str, str]] = set()

    def report(kernel: str, compiled: Any) -> None:
        key = (kernel, compiled.hash)
        if key in seen:
            return
        seen.add(key)
        row = {**now, "kernel": kernel, "warps": compiled.metadata.num_warps, "shared": compiled.metadata.shared}
        row["spilled"] = spilled(compiled.asm["ptx"], now["capability"])
        row["vector"] = widest(compiled.asm["ptx"])
        row["cubin"] = len(compiled.asm["cubin"])
        print(json.dumps(row), flush=True)

    instead(report, extent == "all")
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float64) if extent == "all" else (torch.bfloat16,)
    for capability in map(int, capabilities.split(",")):
        driver.set_active(Driver(capability))
        for name in names or (CALLS if extent == "all" else one_each()):
            call = CALLS[name]
            for dtype in dtypes:
                now.update(call=name, capability=capability, dtype=str(dtype).removeprefix("torch."))
                further = extent == "all" and call.operation in RULED and dtype == torch.bfloat16
                for width in (call.large[-1], *(OTHER_WIDTHS if further else ())):
                    now.update(width=width)
                    results(call, inputs_of(call, (*call.compiled[:-1], width), dtype), "triton")


if __name__ == "__main__":
    main()
