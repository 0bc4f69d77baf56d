"""Writes the README's table of what each combination costs in bytes, from the cost model.

``python -m gridtron.tools.memory_table README.md`` puts it between its two marks; a test holds the file against it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import yaml

from gridtron.conf.files import PACKAGE
from gridtron.models.config import GPTConfig
from gridtron.models.cost.memory import MemorySettings, rank_memory, rank_parameters
from gridtron.parallel.pipeline.build import FAMILIES, build_schedule
from gridtron.parallel.recompute import RecomputeConfig

BEGIN, END = "<!-- memory table -->", "<!-- end -->"
_PRESET, _LENGTH, _BATCH = "llama3_8b", 8192, 64
_GRIDS: tuple[tuple[int, int, int, str | None, tuple[int, ...]], ...] = (
    (8, 1, 1, None, (0, 1, 2, 3)),
    (4, 2, 1, None, (0, 1, 2, 3)),
    (2, 4, 1, None, (0, 1)),
    (1, 8, 1, None, (0,)),
    (2, 2, 2, "1f1b", (0, 1, 2, 3)),
    (2, 2, 2, "zb_v", (0, 1, 2, 3)),
    (1, 2, 4, "1f1b", (0,)),
    (1, 1, 8, "interleaved_1f1b", (0,)),
)
"""(data, tensor, pipeline, schedule, ZeRO stages) of the rows, on eight devices each."""
_RECOMPUTE = {
    "none": RecomputeConfig("none"),
    "elementwise": RecomputeConfig("selective", operations=[]),
    "full": RecomputeConfig("full"),
}


def render() -> str:
    """The text between the marks."""
    return "\n".join(("", *_combinations(), "", *_per_parameter(), "", *_per_rank(), ""))


def preset(name: str) -> GPTConfig:
    """A model of ``conf/model/``."""
    return GPTConfig(**yaml.safe_load((PACKAGE / "model" / f"{name}.yaml").read_text(encoding="utf-8")))


def _combinations() -> Iterator[str]:
    split = [name for name in FAMILIES if build_schedule(name, 2, 4).splits_backward]
    yield "Every ZeRO stage goes with every precision, optimizer, size of the grid, schedule and recomputation."
    yield "Refused by name: a list of `recompute.operations` with schedules that split the backward pass"
    yield f"({', '.join(split)}); `recompute.mode=auto` with a model of your own; with zero above 0 a plugin's"
    yield "optimizer that is not known to treat every number by itself; with zero 3 a model of your own with parameters"
    yield "of several dtypes."


# ---------------------------------------------------------------- bytes a parameter
def _per_parameter() -> Iterator[str]:
    yield "Bytes a parameter between steps, S ranks sharing one set of states (`data_parallel.shard_size`, or all of"
    yield "data): weights, wide main weights, wide gradients, optimizer states. Muon keeps of hidden matrices what SGD"
    yield "with momentum does, of all else what AdamW does. One plain process in fp32 or fp64 has no gradients between"
    yield "steps."
    yield ""
    yield "| precision | optimizer | zero 0 | zero 1 | zero 2 | zero 3 |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for precision in ("fp32", "bf16", "fp64"):
        shown = "bf16, fp16" if precision == "bf16" else precision
        for optimizer, momentum in (("adamw", 0.0), ("sgd", 0.9), ("sgd", 0.0)):
            name = optimizer + (" with momentum" if momentum else "")
            cells = [_law(precision, optimizer, momentum, zero) for zero in range(4)]
            yield f"| {shown} | {name} | {' | '.join(cells)} |"


def _law(precision: str, optimizer: str, momentum: float, zero: int) -> str:
    """``a + b/S``, from two sizes of S."""
    # Sizes that every S below divides, so that nothing is rounded.
    config = GPTConfig(num_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=64)
    settings = MemorySettings(config, 64, zero=zero, precision=precision, optimizer=optimizer, momentum=momentum)
    count = rank_parameters(settings).total
    two, four = (Fraction(rank_memory(replace(settings, data=data)).between_steps, count) for data in (2, 4))
    shared = 4 * (two - four)
    whole = two - shared / 2
    words = [str(whole)] * (whole > 0 or shared == 0) + [f"{shared}/S"] * (shared > 0)
    return " + ".join(words)


# ---------------------------------------------------------------- bytes a rank
def _per_rank() -> Iterator[str]:
    config = preset(_PRESET)
    yield f"GB of the fullest rank, `{_PRESET}` in bf16 with AdamW, {_BATCH} samples of {_LENGTH} tokens a step, one a"
    yield "microbatch, on 8 devices, sequence parallelism wherever tensor is above 1: between steps, and at the step's"
    yield "peak with nothing recomputed, with what is elementwise (`recompute=selective recompute.operations=[]`), and"
    yield "with whole layers. Counted as `models/cost/` counts, without the allocator's and the libraries' own."
    yield ""
    yield "| data | tensor | pipeline | zero | between | peak: none | elementwise | full |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for data, tensor, pipeline, family, stages in _GRIDS:
        schedule = build_schedule(family, pipeline, _BATCH // data) if family else None
        settings = MemorySettings(
            config,
            _LENGTH,
            microbatches=_BATCH // data,
            data=data,
            tensor=tensor,
            schedule=schedule,
            sequence_parallel=tensor > 1,
            precision="bf16",
        )
        for zero in stages:
            own = replace(settings, zero=zero)
            between = max(rank_memory(own, rank).between_steps for rank in range(pipeline))
            peaks = [_peak(own, name, choice) for name, choice in _RECOMPUTE.items()]
            shown = f"{pipeline} ({family})" if family else str(pipeline)
            yield f"| {data} | {tensor} | {shown} | {zero} | {_gigabytes(between)} | {' | '.join(peaks)} |"


def _peak(settings: MemorySettings, name: str, choice: RecomputeConfig) -> str:
    schedule = settings.schedule
    if name == "elementwise" and schedule is not None and schedule.splits_backward:
        return "refused"
    chosen = replace(settings, recompute=choice)
    ranks = 1 if schedule is None else schedule.ranks
    return _gigabytes(max(rank_memory(chosen, rank).peak for rank in range(ranks)))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}"


def replaced(text: str) -> str:
    """A page with the table between its marks.

    Raises:
        ValueError: a page without them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} with a later {END}: put both where the table belongs")
    return f"{before}{BEGIN}{render()}{END}{after}"


def main(arguments: Sequence[str]) -> int:
    """Writes the table into the file named; 2 for another number of arguments, or a page without the marks."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m gridtron.tools.memory_table README.md", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    try:
        text = replaced(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        print(f"memory_table: {path}: {fault}", file=sys.stderr)
        return 2
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
