"""``gridtron bench gpu``: kernels against the device's memory, and a training step against its peak rate."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.conf.refusal import Refusal
from gridtron.tools.arguments import print_refusal
from gridtron.tools.bench.gpu_clock import Budget, Measure, Work

if TYPE_CHECKING:
    import torch

    from gridtron.core.capabilities import Capabilities
    from gridtron.tools.bench.cli import BenchOptions
    from gridtron.tools.bench.gpu_kernels import Compiler, Operation, Sizes
    from gridtron.tools.bench.plain import Shape

SECONDS = 270
"""For everything: under five minutes."""
TARGET = 0.9
"""Share of a copy's bandwidth that is aimed at."""
BOUND_BY_MEMORY = ("rms_norm", "layer_norm", "rope", "swiglu", "adamw")
"""Operations that the target is for."""


@dataclass(frozen=True)
class Machine:
    """What is measured on, and how. All of it can be replaced in a test.

    Args:
        device: where the tensors lie.
        dtype: of activations and weights.
        found: what the machine can.
        measure: takes the time of contenders.
        compiler, backend: torch.compile, and what it compiles this project's layers with.
        copy_bytes: size of the copy that bandwidths are held against.
    """

    device: torch.device
    dtype: torch.dtype
    found: Capabilities
    measure: Measure
    compiler: Compiler
    backend: str = "inductor"
    copy_bytes: int = 2**32


def run(options: BenchOptions) -> int:
    """Measures, prints, writes ``options.out``; 2 without a device, before anything runs."""
    from gridtron.core.capabilities import find_capabilities

    found = find_capabilities()
    faults = [] if found.cuda_devices else ["bench gpu: this machine has no CUDA device; run it where there is one"]
    if found.cuda_devices and found.triton is None:
        faults = ["bench gpu: Triton is not installed; pip install 'gridtron[triton]'"]
    if faults:
        return print_refusal(Refusal(faults))
    import torch

    from gridtron.tools.bench.gpu_clock import device_measure
    from gridtron.tools.bench.gpu_kernels import TINY, Sizes
    from gridtron.tools.bench.gpu_step import LARGE
    from gridtron.tools.bench.plain import SHAPES

    torch.cuda.set_device(0)
    budget = Budget(SECONDS)
    tiny = options.shape == "tiny"
    measure = device_measure(options.pairs, options.warmup, budget)
    machine = Machine(torch.device("cuda", 0), torch.bfloat16, found, measure, torch.compile)
    figures = measure_all(machine, options, TINY if tiny else Sizes(), SHAPES["tiny"] if tiny else LARGE, budget)
    show(figures)
    if options.out:
        Path(options.out).expanduser().write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def measure_all(machine: Machine, options: BenchOptions, sizes: Sizes, shape: Shape, budget: Budget) -> dict[str, Any]:
    """All figures, as JSON holds them."""
    from gridtron.core.grid import Grid
    from gridtron.tools.bench.environment import describe_environment
    from gridtron.tools.bench.gpu_kernels import has_liger
    from gridtron.tools.bench.gpu_step import Setting, measure_step
    from gridtron.tools.bench.sections import found

    peers = found("Hugging Face", options.peers)
    missing = [] if peers else ["transformers"]
    missing += [] if has_liger() else ["liger-kernel"]
    missing += [] if machine.found.apex == "nvidia" else ["NVIDIA apex"]
    copy = copy_bandwidth(machine)
    rows = measure_kernels(machine, sizes, copy, budget.part(0.5))
    rows += measure_adamw(machine, shape, copy, budget)
    with Grid.create(device=machine.device) as grid:
        steps, warmup = max(1, options.pairs // 2), max(1, options.warmup)
        compilers = machine.compiler, machine.backend
        step = measure_step(
            Setting(shape, grid, machine.dtype, machine.found, peers, *compilers, steps, warmup), budget
        )
    return {
        "environment": describe_environment(),
        "missing": missing,
        "dtype": str(machine.dtype).removeprefix("torch."),
        "copy_bytes_per_second": copy,
        "kernels": rows,
        "step": step,
        "seconds": budget.spent,
    }


def copy_bandwidth(machine: Machine) -> float:
    """Bytes a second, read and written, of a copy between two tensors that no cache holds."""
    import torch

    source, target = (torch.zeros(machine.copy_bytes // 4, device=machine.device) for _ in range(2))
    return 2 * source.nbytes / machine.measure({"copy": lambda: target.copy_(source)})["copy"]


# ---------------------------------------------------------------- kernels
def measure_kernels(machine: Machine, sizes: Sizes, copy: float, budget: Budget) -> list[dict[str, Any]]:
    """Two rows an operation: its forward pass, and both passes; those that there is no time for are named."""
    from gridtron.tools.bench.gpu_kernels import operations

    rows = []
    for operation in operations(sizes, machine.device, machine.dtype):
        if budget.left <= 0:
            rows.append({"operation": operation.name, "size": operation.size, "skipped": "no time was left"})
            continue
        rows += _operation_rows(machine, operation, copy)
    return rows


def _operation_rows(machine: Machine, operation: Operation, copy: float) -> list[dict[str, Any]]:
    from gridtron.tools.bench.gpu_kernels import contenders, own_inputs, results_of, with_gradients

    inputs = operation.inputs()
    forward: dict[str, Work] = {}
    both: dict[str, Work] = {}
    failed, results = {}, {}
    for name, contender in contenders(operation, machine.found, machine.compiler).items():
        given = own_inputs(inputs)
        try:
            if not operation.random:
                results[name] = [one.detach().clone() for one in results_of(contender, given)]
            both[name] = with_gradients(contender, given)
            both[name]()
        except Exception as fault:  # one contender that fails must not lose the figures of the others
            failed[name] = f"{type(fault).__name__}: {fault}".splitlines()[0]
            both.pop(name, None)
            continue
        forward[name] = lambda contender=contender, given=given: contender(given)  # type: ignore[misc]
    differences = _differences(results)
    rows = []
    for number, (label, works) in enumerate((("forward", forward), ("forward and backward", both))):
        size = None if operation.bytes is None else operation.bytes[number]
        flops = None if operation.flops is None else operation.flops[number]
        row = _row(operation.name, operation.size, label, machine.measure(works) if works else {}, copy, size, flops)
        rows.append(row | {"differences": differences, "failed": failed})
    return rows


def _differences(results: Mapping[str, list[torch.Tensor]]) -> dict[str, float]:
    """Relative Euclidean distance of each contender's result from plain torch's."""
    found = {}
    for name, ours in results.items():
        if name != "torch" and "torch" in results:
            pairs = [(a.float(), b.float()) for a, b in zip(ours, results["torch"], strict=True)]
            distance = sum(float((a - b).norm()) ** 2 for a, b in pairs) ** 0.5
            found[name] = distance / max(sum(float(b.norm()) ** 2 for _, b in pairs) ** 0.5, 1e-30)
    return found


def measure_adamw(machine: Machine, shape: Shape, copy: float, budget: Budget) -> list[dict[str, Any]]:
    """One row: an update of all parameters of the step's model."""
    import math

    from gridtron.tools.bench import gpu_bytes
    from gridtron.tools.bench.gpu_adamw import shapes_of, updates

    shapes = shapes_of(shape)
    count = sum(math.prod(one) for one in shapes)
    size = f"{count / 1e9:.2f}e9 parameters"
    if budget.left <= 0:
        return [{"operation": "adamw", "size": size, "skipped": "no time was left"}]
    seconds = machine.measure(updates(shapes, machine.device, machine.dtype, machine.found))
    gc.collect()
    if machine.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
    return [_row("adamw", size, "update", seconds, copy, gpu_bytes.adamw(count, machine.dtype.itemsize), None)]


def _row(
    operation: str,
    size: str,
    label: str,
    seconds: Mapping[str, float],
    copy: float,
    moved: int | None,
    flops: int | None,
) -> dict[str, Any]:
    """A row of the table: times, bandwidths as shares of a copy's, and whether ours reaches the target."""
    found: dict[str, Any] = {}
    for name, one in seconds.items():
        found[name] = {"seconds": one}
        if moved is not None:
            found[name] |= {"bytes_per_second": moved / one, "share_of_copy": moved / one / copy}
        if flops is not None:
            found[name]["flops_per_second"] = flops / one
    bounded = operation in BOUND_BY_MEMORY and "triton" in found
    return {
        "operation": operation,
        "size": size,
        "pass": label,
        "bytes": moved,
        "flops": flops,
        "contenders": found,
        "target": TARGET if bounded else None,
        "holds": found["triton"]["share_of_copy"] >= TARGET if bounded else None,
    }


# ---------------------------------------------------------------- what is shown
def show(figures: Mapping[str, Any]) -> None:
    """Two tables: kernels, and the step."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    copy = figures["copy_bytes_per_second"]
    for name in figures["missing"]:
        console.print(f"missing: {name}; the others run without it")
    table = Table(
        "operation", "size", "pass", title=f"kernels; a copy moves {copy / 1e12:.2f} TB/s", title_justify="left"
    )
    names = ("triton", "apex", "torch", "torch.compile", "Liger")
    for name in (*names, "of a copy", f"target {TARGET:g}"):
        table.add_column(name, justify="right")
    for row in figures["kernels"]:
        found = row.get("contenders", {})
        times = [f"{1e6 * found[name]['seconds']:.0f} us" if name in found else "" for name in names]
        share = found.get("triton", {}).get("share_of_copy")
        held = {True: "holds", False: "missed", None: ""}[row.get("holds")]
        label = row.get("pass") or row["skipped"]
        table.add_row(row["operation"], row["size"], label, *times, f"{share:.2f}" if share else "", held)
    console.print(table)
    for row in figures["kernels"]:
        for name, fault in row.get("failed", {}).items():
            console.print(f"failed: {row['operation']} by {name}: {fault}", markup=False)
    _show_step(console, figures["step"])


def _show_step(console: Any, step: Mapping[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"one training step, {step['flops']:.3g} FLOP", title_justify="left")
    for name in ("", "seconds", "tokens/s", "MFU", "peak GB", "first loss", "last loss"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in step["contenders"].items():
        if "seconds" not in row:
            table.add_row(name, row.get("failed") or row["skipped"])
            continue
        mfu, peak = row["mfu"], row["peak_bytes"]
        cells = [f"{row['seconds']:.4f}", f"{row['tokens_per_second']:.0f}", f"{mfu:.3f}" if mfu else ""]
        cells += [f"{peak / 1e9:.1f}" if peak else "", *(f"{loss:.4f}" for loss in row["losses"])]
        table.add_row(name, *cells)
    console.print(table)
    if step["holds"] is not None:
        console.print(f"MFU of {step['target']:g}: {'holds' if step['holds'] else 'missed'}")
    if step["equal_losses"] is False:
        console.print("The losses differ: these figures do not compare the same work.", style="bold red")
