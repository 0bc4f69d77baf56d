"""The commands, and the help page over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One word of the command line.

    Args:
        module: its ``main(arguments) -> int`` runs the command; imported when it is asked for.
        meaning: one line.
        examples: lines for the help page.
    """

    module: str
    meaning: str
    examples: tuple[str, ...]


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
    "doctor": Command("gridtron.tools.doctor", "devices, versions, and what is missing", ("gridtron doctor",)),
    "bench": Command(
        "gridtron.tools.bench.cli",
        "measure against peers, in alternation",
        ("gridtron bench tensor_parallel out=bench.json",),
    ),
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
        print(f"  {name:<9}{command.meaning}")
    print("\nExamples:")
    for command in shown.values():
        for example in command.examples:
            print(f"  {example}")
    print(f"\n{_FOOT}")
    return 0
