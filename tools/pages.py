"""The commands, and the help page over them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Command:
    """One word of the command line.

    Args:
        module: its ``main(arguments) -> int`` runs the command; imported when it is asked for.
        meaning: one line.
        examples: lines for the help page.
        options: name of the dataclass in ``module`` that holds options of the command's own.
    """

    module: str
    meaning: str
    examples: tuple[str, ...]
    options: str | None = None


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "gridtron.tools.train",
        "train a GPT over a process grid; starts the processes itself",
        (
            "gridtron train experiment=first_run",
            "gridtron train model=small grid.tensor=2 train.steps=500 data.path=~/books/*.txt",
            "gridtron train -m grid.tensor=1,2 run.directory=runs/sweep    (one job after another)",
            "gridtron train run.directory=runs/mine                        (again: goes on where it stopped)",
            "torchrun --nproc-per-node 8 -m gridtron train model=llama3_8b grid.tensor=8",
        ),
    ),
    "prepare": Command(
        "gridtron.tools.prepare",
        "turn text or jsonl into token files (train does it by itself on first use)",
        ("gridtron prepare data.path=~/books/*.txt data.tokenizer=tokenizer.json out=summary.json",),
    ),
    "schedule": Command(
        "gridtron.tools.schedule",
        "prove, simulate and draw a pipeline schedule; nothing is run",
        (
            "gridtron schedule name=zb_h1 ranks=4 microbatches=8",
            "gridtron schedule name=zb_v ranks=4 microbatches=8 forward=1.0 input_grad=1.1 weight_grad=0.8 send=0.1",
            "gridtron schedule experiment=first_run grid.pipeline=4 svg=mine.svg out=mine.json",
        ),
        "ScheduleOptions",
    ),
    "convert": Command(
        "gridtron.tools.convert",
        "Hugging Face weights to a checkpoint, a checkpoint to Hugging Face weights",
        (
            "gridtron convert source=~/models/Llama-3.1-8B target=llama",
            "gridtron convert source=runs/mine target=exported dtype=bf16",
        ),
        "ConvertOptions",
    ),
    "checkpoint": Command(
        "gridtron.tools.checkpoint.cli",
        "look into a checkpoint, verify and repair it, compare two, export one file",
        (
            "gridtron checkpoint inspect path=runs/mine",
            "gridtron checkpoint verify path=runs/mine/checkpoints/step-00001000 repair=true",
            "gridtron checkpoint diff path=runs/mine other=runs/another tolerance=1e-6",
            "gridtron checkpoint export path=runs/mine target=weights.safetensors dtype=bf16",
        ),
    ),
    "doctor": Command("gridtron.tools.doctor", "devices, versions, and what is missing", ("gridtron doctor",)),
    "bench": Command(
        "gridtron.tools.bench.cli",
        "measure against peers, in alternation",
        ("gridtron bench tensor_parallel out=bench.json",),
    ),
}


@dataclass(frozen=True)
class Word:
    """The second word of a command.

    Args:
        module: its ``run(options) -> int`` runs it.
        options: name of the dataclass in ``module`` that holds its options.
        meaning: one line.
    """

    module: str
    options: str
    meaning: str


CHECKPOINT_WORDS: Mapping[str, Word] = {
    "inspect": Word("gridtron.tools.checkpoint.inspect", "InspectOptions", "what it holds, from its manifest alone"),
    "verify": Word("gridtron.tools.checkpoint.verify", "VerifyOptions", "every byte against its checksum; repair"),
    "diff": Word("gridtron.tools.checkpoint.diff", "DiffOptions", "where two differ, and by how much"),
    "export": Word("gridtron.tools.checkpoint.export", "ExportOptions", "one safetensors file of it"),
}

_FOOT = """\
Options are key=value (docs/configuration.md lists them all), groups of options GROUP=FILE:
  grid.tensor=2 grid.data=4        sizes of the process grid; -1: what is left
  model=llama3_8b                  a file of conf/model/, or of ./conf/model/ of your own
  precision=fp64 recompute=full optimizer=sgd lr_schedule=wsd
  train.steps=1000 train.global_batch_size=64 train.micro_batch_size=4 train.sequence_length=1024
  run.directory=PATH               where the run writes; the same again goes on
Flags:
  -m, --multirun                   a sweep over values given as 1,2,4
  --cfg job                        print the configuration, start nothing
  --config-dir FOLDER              option files of your own, searched first
  --help                           this page
Exit codes: 0; 1 the job failed; 2 the request was wrong, nothing was started."""


def print_help(word: str | None) -> int:
    """The help page, of one command or of all."""
    shown = {word: COMMANDS[word]} if word else COMMANDS
    print(f"usage: gridtron {word or 'COMMAND'} [key=value ...] [flags]\n")
    for name, command in shown.items():
        print(f"  {name:<11}{command.meaning}")
    print("\nExamples:")
    for command in shown.values():
        for example in command.examples:
            print(f"  {example}")
    if word and COMMANDS[word].options:
        print(f"\nOptions of {word}, beside those of a run (docs/configuration.md):")
        schema = getattr(importlib.import_module(COMMANDS[word].module), COMMANDS[word].options or "")
        for line in option_lines(schema):
            print(f"  {line}")
    if word == "checkpoint":
        print()
        print_checkpoint_words()
    else:
        print(f"\n{_FOOT}")
    return 0


def print_checkpoint_words() -> None:
    """The second words of ``gridtron checkpoint``, each with its options."""
    for word, described in CHECKPOINT_WORDS.items():
        print(f"gridtron checkpoint {word}: {described.meaning}")
        for line in option_lines(getattr(importlib.import_module(described.module), described.options)):
            print(f"  {line}")
    print("Exit codes: 0; 1 damaged (verify) or different (diff); 2 the request or the checkpoint was wrong.")


def option_lines(schema: type) -> list[str]:
    """``key=default  meaning`` of each option of a dataclass."""
    entries = [(f"{entry.name}={_default(entry)}", entry.metadata["meaning"]) for entry in fields(schema)]
    width = max(len(key) for key, _ in entries) + 2
    return [f"{key:<{width}}{meaning}" for key, meaning in entries]


def _default(entry: Field[Any]) -> str:
    return "null" if entry.default is None else str(entry.default)
