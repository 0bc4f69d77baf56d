"""The ``gridtron`` command: one word, then ``key=value`` and Hydra's own flags.

Exit 0; 1: the job failed; 2: the request was wrong and nothing was started.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gridtron.conf.refusal import Refusal
from gridtron.tools.arguments import compose_or_exit_code, parse_arguments, print_refusal

__all__ = ["compose_or_exit_code", "main"]


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: this process's) and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        return print_help(None) or 2
    word, rest = arguments[0], arguments[1:]
    if word in ("--help", "-h", "help"):
        return print_help(rest[0] if rest and rest[0] in COMMANDS else None)
    if word == "--version":
        from gridtron import __version__

        print(f"gridtron {__version__}")
        return 0
    if word not in COMMANDS:
        return print_refusal(Refusal([_unknown_command(word)]))
    if any(flag in rest for flag in ("--help", "-h")):
        return print_help(word)
    if word == "train":
        return _train(rest)
    return _run(COMMANDS[word].module, rest)


def _train(arguments: list[str]) -> int:
    try:
        parsed = parse_arguments(arguments)
    except Refusal as refusal:
        return print_refusal(refusal)
    if parsed.sweep:
        from gridtron.tools.sweep import run_sweep

        return run_sweep(parsed)
    return _run(COMMANDS["train"].module, arguments)


def _run(module: str, arguments: list[str]) -> int:
    code: int = importlib.import_module(module).main(arguments)
    return code


def _unknown_command(word: str) -> str:
    known = ", ".join(COMMANDS)
    if "=" in word:
        return f"{word}: a command comes first; nearest: gridtron train {word} (commands: {known})"
    close = difflib.get_close_matches(word, COMMANDS, 1, 0.4)
    hint = f"nearest: {close[0]}; there are {known}" if close else f"there are {known}"
    return f"{word}: no such command; {hint}"


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
