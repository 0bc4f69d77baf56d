"""The ``gridtron`` command: one word, then ``key=value`` and Hydra's own flags.

Exit 0; 1: the job failed; 2: the request was wrong and nothing was started.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from gridtron.conf.refusal import Refusal
from gridtron.tools.arguments import parse_arguments, print_refusal
from gridtron.tools.pages import COMMANDS, print_help


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
