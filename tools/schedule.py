"""``gridtron schedule``: a pipeline schedule proven, simulated and drawn, before anything runs.

By name (``name=zb_h1 ranks=4 microbatches=8``), or that of a run (``experiment=first_run grid.pipeline=4``), whose
stages then cost what their layers do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.conf.refusal import Refusal
from gridtron.core.options import option
from gridtron.tools.arguments import Arguments, parse_arguments, print_refusal, read_options

if TYPE_CHECKING:
    from gridtron.conf.schema import Plan
    from gridtron.parallel.pipeline.schedule import Schedule
    from gridtron.parallel.pipeline.simulate import Timeline


@dataclass(frozen=True)
class ScheduleOptions:
    name: str | None = option(None, "a family, or FILE.csv", path=True)
    ranks: int | None = option(None, "along the pipeline axis; null: the file's", minimum=1)
    microbatches: int | None = option(None, "a step; null: the file's", minimum=1)
    chunks: int | None = option(None, "stages that each rank holds; null: what the family needs", minimum=1)
    forward: float | list[float] = option(1.0, "cost of a forward pass; or a list, one a stage", minimum=0)
    backward: float | list[float] | None = option(None, "null: both halves; given without them: halved", minimum=0)
    input_grad: float | list[float] | None = option(None, "of the gradient of the input; null: 1", minimum=0)
    weight_grad: float | list[float] | None = option(None, "of the gradient of the weights; null: 1", minimum=0)
    send: float = option(0.0, "latency between ranks, in the same unit", minimum=0)
    out: str | None = option(None, "JSON file for the numbers", path=True)
    svg: str | None = option(None, "picture to write", path=True)
    png: str | None = option(None, "picture to write", path=True)
    trace: str | None = option(None, "Chrome trace to write", path=True)
    directory: str | None = option("schedules", "for all three where none is named; null: none is written", path=True)


_OF_A_PLAN: Mapping[str, str] = {
    "name": "pipeline.schedule",
    "ranks": "grid.pipeline",
    "microbatches": "train.global_batch_size and train.micro_batch_size",
    "chunks": "pipeline.chunks",
}
"""Options that a run's plan has under other names."""
_COSTS = ("forward", "backward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class Subject:
    """What is drawn.

    Args:
        schedule: the table.
        costs: keyword arguments of ``simulate``.
        facts: what else there is to tell, key -> value.
    """

    schedule: Schedule
    costs: Mapping[str, Any]
    facts: Mapping[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Prints the timeline and writes the pictures; 2 for a wrong request."""
    try:
        parsed = parse_arguments(arguments)
        options, timeline, subject = _simulate(parsed)
        written = _write(options, timeline, subject)
    except Refusal as refusal:
        return print_refusal(refusal)
    _show(timeline, subject, written)
    return 0


def _simulate(parsed: Arguments) -> tuple[ScheduleOptions, Timeline, Subject]:
    from gridtron.conf.schema import SECTIONS
    from gridtron.parallel.pipeline.lower import lower
    from gridtron.parallel.pipeline.simulate import simulate

    if parsed.sweep or parsed.show:
        raise Refusal([f"{'-m' if parsed.sweep else '--cfg'}: schedule draws one table; leave it out"])
    own = {field.name for field in fields(ScheduleOptions)}
    plan_words = [word for word in parsed.overrides if _belongs_to_a_plan(word, own, SECTIONS)]
    rest = [word for word in parsed.overrides if word not in plan_words]
    options = read_options("schedule", ScheduleOptions, rest)
    _check_files(options)
    if plan_words or parsed.directories:
        subject = _of_a_run(plan_words, parsed.directories, rest)
    else:
        subject = _by_name(options)
    try:
        lower(subject.schedule).validate()
        timeline = simulate(subject.schedule, **subject.costs, send=options.send)
    except ValueError as fault:
        raise Refusal([str(fault)]) from None
    return options, timeline, subject


def _belongs_to_a_plan(word: str, own: set[str], sections: Mapping[str, type]) -> bool:
    key = word.partition("=")[0].lstrip("+~")
    return key not in own and ("." in key or key in sections or key in ("experiment", "plugins"))


def _check_files(options: ScheduleOptions) -> None:
    faults = [
        f"{key}={value}: the file's name ends in .{key}; nearest: {Path(value).with_suffix(f'.{key}')}"
        for key, value in (("svg", options.svg), ("png", options.png))
        if value is not None and Path(value).suffix.lower() != f".{key}"
    ]
    if faults:
        raise Refusal(faults)


# -------------------------------------------------------------------- which schedule
def _by_name(options: ScheduleOptions) -> Subject:
    from gridtron.parallel.pipeline.build import FAMILIES, build_schedule

    if options.name is None:
        raise Refusal(
            [
                f"schedule needs name=FAMILY ranks=N microbatches=M (families: {', '.join(FAMILIES)}), name=FILE.csv, "
                "or a run, as in experiment=first_run grid.pipeline=4"
            ]
        )
    ranks, microbatches = options.ranks, options.microbatches
    try:
        if options.name.endswith(".csv"):
            from gridtron.parallel.pipeline.csv_table import read_csv

            table = read_csv(Path(options.name))
            ranks, microbatches = ranks or table.ranks, microbatches or table.microbatches
        missing = [f"{key}=N" for key, value in (("ranks", ranks), ("microbatches", microbatches)) if value is None]
        if ranks is None or microbatches is None:
            raise Refusal([f"name={options.name}: {' and '.join(missing)} must be given too"])
        schedule = build_schedule(options.name, ranks, microbatches, options.chunks)
    except Refusal:
        raise
    except ValueError as fault:
        raise Refusal([str(fault).replace("schedule=", "name=", 1)]) from None
    return Subject(schedule, _costs_by_hand(options), {})


def _costs_by_hand(options: ScheduleOptions) -> dict[str, Any]:
    costs = {key: getattr(options, key) for key in _COSTS if getattr(options, key) is not None}
    if "backward" in costs and not {"input_grad", "weight_grad"} & set(costs):
        whole = costs["backward"]
        half = [value / 2 for value in whole] if isinstance(whole, list) else whole / 2
        costs |= {"input_grad": half, "weight_grad": half}
    return costs


def _of_a_run(words: Sequence[str], directories: Sequence[str], rest: Sequence[str]) -> Subject:
    """The schedule of a plan's steps, with costs of its stages by the formulae of ``models/cost``."""
    from gridtron.conf.compose import compose
    from gridtron.conf.pipeline_rules import plan_schedule
    from gridtron.conf.rules import Surroundings, sizes_of

    given = [word.partition("=")[0] for word in rest]
    faults = [f"{key}=: the plan says it; set {_OF_A_PLAN[key]} instead" for key in given if key in _OF_A_PLAN]
    faults += [
        f"{key}=: the plan's stages cost what their layers do; leave it out, or draw by name= with costs of your own"
        for key in given
        if key in _COSTS
    ]
    if faults:
        raise Refusal(faults)
    # Nothing is run: neither the machine's size nor the text matters.
    around = Surroundings(cores=2**31, data_fault=lambda config: None, folder_fault=lambda folder: None)
    plan = compose(words, directories, surroundings=around)
    sizes = sizes_of(plan, around)
    assert sizes is not None, "refused by the rules"
    schedule = plan_schedule(plan, sizes["pipeline"], sizes["data"] * sizes["context"])
    costs, facts = _costs_of(plan, schedule)
    return Subject(schedule, costs, facts)


def _costs_of(plan: Plan, schedule: Schedule) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Costs in units of a stage's mean forward pass; 1 each for a model whose layers are not known."""
    from gridtron.models.config import GPTConfig
    from gridtron.models.cost.split import stage_costs
    from gridtron.models.partition import layer_ranges

    if not isinstance(plan.model, GPTConfig) or plan.model.build is not None:
        return {}, {"unit": "1: a forward pass (what the stages of this model cost is not known)"}
    length = plan.train.sequence_length
    try:
        ranges = layer_ranges(plan.model, schedule.num_stages, plan.pipeline.layers_per_stage, length)
    except ValueError as fault:
        raise Refusal([str(fault)]) from None
    policies = _policies(plan, schedule, ranges)
    costs = stage_costs(plan.model, ranges, length, policies=policies, operations=plan.recompute.operations or ())
    unit = sum(costs.forward) / len(costs.forward)
    scaled = {key: [value / unit for value in getattr(costs, key)] for key in ("forward", "input_grad", "weight_grad")}
    counts = [stop - start for start, stop in ranges]
    return scaled, {"layers_per_stage": counts, "unit": "1: the mean forward pass of a stage, by FLOPs"}


def _policies(plan: Plan, schedule: Schedule, ranges: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """What is recomputed of each layer of the model."""
    from gridtron.conf.recompute_rules import memory_settings
    from gridtron.conf.rules import Surroundings, sizes_of
    from gridtron.models.cost.choice import choose_recompute
    from gridtron.parallel.recompute import layer_policies

    if plan.recompute.mode != "auto":
        return tuple(policy for start, stop in ranges for policy in layer_policies(plan.recompute, stop - start))
    sizes = sizes_of(plan, Surroundings())
    assert sizes is not None and plan.recompute.budget_bytes is not None, "refused by the rules"
    # Nothing is run, so nothing tells the device: as the rules had it, which judged without one.
    precision = "fp32" if plan.precision.mode == "auto" else plan.precision.mode
    return choose_recompute(memory_settings(plan, sizes, precision), plan.recompute.budget_bytes)


# -------------------------------------------------------------------- what is written and shown
def _write(options: ScheduleOptions, timeline: Timeline, subject: Subject) -> list[str]:
    """Writes what was asked for; the names of the files."""
    from gridtron.parallel.pipeline.draw import plot

    schedule = subject.schedule
    files = {key: getattr(options, key) for key in ("svg", "png", "trace")}
    if not any(files.values()) and options.directory is not None:
        chunks = max(len(schedule.stages(rank)) for rank in range(schedule.ranks))
        sizes = [schedule.ranks, schedule.microbatches, *([chunks] if chunks > 1 else [])]
        stem = f"{Path(schedule.name).stem}-{'x'.join(map(str, sizes))}"
        endings = {"svg": "svg", "png": "png", "trace": "trace.json"}
        files = {key: str(Path(options.directory, f"{stem}.{ending}")) for key, ending in endings.items()}
        _attempt(
            "directory", options.directory, lambda: Path(options.directory or "").mkdir(parents=True, exist_ok=True)
        )
    for key in ("svg", "png"):
        if files[key]:
            _attempt(key, files[key], lambda file=files[key]: plot(timeline, file))  # type: ignore[misc]
    if files["trace"]:
        _attempt("trace", files["trace"], lambda: timeline.to_chrome_trace(files["trace"]))
    if options.out is not None:
        text = json.dumps(_report(timeline, subject), indent=1) + "\n"
        _attempt("out", options.out, lambda: Path(options.out or "").write_text(text, encoding="utf-8"))
    return [file for file in (*files.values(), options.out) if file]


def _attempt(key: str, file: str, write: Callable[[], Any]) -> None:
    try:
        write()
    except OSError as fault:
        raise Refusal([f"{key}={file}: {fault.strerror}; give another place"]) from None


def _report(timeline: Timeline, subject: Subject) -> dict[str, Any]:
    """The timeline as JSON can hold it."""
    schedule = subject.schedule
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "costs": dict(subject.costs),
        **subject.facts,
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "peak_activations": list(timeline.peak_activations),
        "events": [
            [{"action": str(event.action), "start": event.start, "end": event.end} for event in row]
            for row in timeline.events
        ],
    }


def _show(timeline: Timeline, subject: Subject, written: Sequence[str]) -> None:
    from rich.console import Console

    from gridtron.parallel.pipeline.draw import summary, terminal, title

    console = Console(file=sys.stdout, highlight=False)
    colour = console.is_terminal and console.color_system is not None and not console.no_color
    # A pipe has no width of its own.
    width = console.width if console.is_terminal else 120
    lines = [title(subject.schedule), summary(timeline)]
    if "layers_per_stage" in subject.facts:
        lines.append(f"layers per stage {' '.join(map(str, subject.facts['layers_per_stage']))}")
    if "unit" in subject.facts:
        lines.append(f"unit of time {subject.facts['unit']}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    console.print(terminal(timeline, width, colour), soft_wrap=True)
    console.print()
    for file in written:
        console.print(f"wrote {file}", markup=False, soft_wrap=True)
