"""``gridtron bench NAME``: this project beside its peers, in alternation, as ratios with intervals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gridtron.conf.names import nearest_choice
from gridtron.conf.refusal import Refusal
from gridtron.core.options import option
from gridtron.tools.arguments import parse_arguments, print_refusal, read_options
from gridtron.tools.pages import option_lines

_BATCH = 8
"""Sequences a step, of every shape."""


@dataclass(frozen=True)
class BenchOptions:
    shape: str = option(
        "small",
        "full (24M parameters, 2048 tokens a step; checkpoint: 1 GB), small, both, or tiny (a check of the tool)",
        choices=("full", "small", "both", "tiny"),
    )
    pairs: int = option(20, "counted rounds", minimum=4)
    warmup: int = option(3, "rounds before them", minimum=0)
    ranks: int = option(2, "processes of the parallel parts", minimum=2)
    microbatches: int = option(8, "of the pipeline part; they divide the batch of 8", minimum=1)
    peers: str = option(".peers", "folder of the peers' packages, made by `make peers`", path=True)
    out: str | None = option(None, "JSON file for the figures", path=True)
    chart: str | None = option(None, "step: picture of the ratios (.svg, .png or .pdf)", path=True)

    @property
    def shapes(self) -> tuple[str, ...]:
        return ("full", "small") if self.shape == "both" else (self.shape,)


def benchmarks() -> dict[str, Callable[[BenchOptions], int]]:
    """Name -> what runs it."""
    from gridtron.tools.bench.checkpoint import run as checkpoint
    from gridtron.tools.bench.data_parallel import run as data_parallel
    from gridtron.tools.bench.gpu import run as gpu
    from gridtron.tools.bench.pipeline import run as pipeline
    from gridtron.tools.bench.start import run as start
    from gridtron.tools.bench.step import run as step
    from gridtron.tools.bench.tensor_parallel import run as tensor_parallel

    return {
        "step": step,
        "tensor_parallel": tensor_parallel,
        "pipeline": pipeline,
        "data_parallel": data_parallel,
        "checkpoint": checkpoint,
        "start": start,
        "gpu": gpu,
    }


def main(arguments: Sequence[str]) -> int:
    """Runs one benchmark; 2 for a wrong request."""
    try:
        words = [word for word in arguments if "=" not in word and not word.startswith("-")]
        known = benchmarks()
        parsed = parse_arguments([word for word in arguments if word not in words])
        if parsed.help or not words:
            print(_help(known))
            return 0 if parsed.help else 2
        if words[0] not in known or len(words) > 1:
            wrong = words[0] if words[0] not in known else words[1]
            raise Refusal([f"bench {wrong}: {nearest_choice(wrong, list(known))}"])
        options = parse_options(parsed.overrides)
        _check(words[0], options)
    except Refusal as refusal:
        return print_refusal(refusal)
    return known[words[0]](options)


def _check(name: str, options: BenchOptions) -> None:
    """What could not run, or not be written in the end, is refused before anything is measured.

    Raises:
        Refusal: with every fault.
    """
    faults = []
    if options.out is not None and not (folder := Path(options.out).expanduser().absolute().parent).is_dir():
        faults.append(f"out={options.out}: there is no folder {folder}; make it, or give another file")
    if options.chart is not None:
        from gridtron.tools.bench.chart import check_chart

        fault = check_chart(options.chart) if name == "step" else "only bench step draws a chart; leave it out"
        if fault is not None:
            faults.append(f"chart={options.chart}: {fault}")
    if name in ("step", "pipeline") and _BATCH % options.microbatches:
        near = max(count for count in range(1, _BATCH + 1) if _BATCH % count == 0 and count <= options.microbatches)
        faults.append(f"microbatches={options.microbatches}: must divide the batch of {_BATCH}; nearest: {near}")
    if faults:
        raise Refusal(faults)


def parse_options(overrides: Sequence[str]) -> BenchOptions:
    """Options from ``key=value``.

    Raises:
        Refusal: every unknown key and unfit value.
    """
    return read_options("bench", BenchOptions, overrides)


def _help(known: dict[str, Callable[[BenchOptions], int]]) -> str:
    lines = ["gridtron bench NAME [key=value ...]", "", f"names: {', '.join(known)}", ""]
    lines += [f"  {line}" for line in option_lines(BenchOptions)]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
