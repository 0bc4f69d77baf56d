"""What may stand after a command's word: ``key=value`` and Hydra's own flags; and a refusal's way to the user."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from gridtron.conf.names import nearest_choice
from gridtron.conf.refusal import Refusal, format_refusal
from gridtron.conf.schema import Plan
from gridtron.conf.values import Violation, convert
from gridtron.tools.pages import print_help

_WITH_VALUE = {"--cfg": "show", "-c": "show", "--config-dir": "directory", "-cd": "directory"}
_PLAIN = {"-m": "sweep", "--multirun": "sweep", "--help": "help", "-h": "help", "--resolve": "resolve"}


@dataclass(frozen=True)
class Arguments:
    """A command line after the command's word.

    Args:
        overrides: ``key=value`` and whatever else is no flag.
        directories: of option files (``--config-dir``).
        sweep: ``-m`` was given.
        show: ``--cfg job`` was given: print the configuration, start nothing.
        help: ``--help`` was given.
    """

    overrides: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    sweep: bool = False
    show: bool = False
    help: bool = False


def parse_arguments(arguments: Sequence[str]) -> Arguments:
    """Parts flags from overrides.

    Raises:
        Refusal: an unknown flag, or one without its value.
    """
    overrides, directories, faults = [], [], []
    found = dict.fromkeys(("sweep", "show", "help", "resolve"), False)
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if flag in _WITH_VALUE:
            if not equals:
                if not waiting or waiting[0].startswith("-"):
                    faults.append(f"{flag}: a value is missing, as in --cfg job or --config-dir FOLDER")
                    continue
                value = waiting.pop(0)
            if _WITH_VALUE[flag] == "directory":
                directories.append(value)
            elif value == "job":
                found["show"] = True
            else:
                faults.append(f"{flag} {value}: only the job's configuration is shown; nearest: --cfg job")
        elif word in _PLAIN:
            found[_PLAIN[word]] = True
        elif word.startswith("-"):
            faults.append(
                f"{word}: no such flag; there are -m, --cfg job, --config-dir FOLDER, --help; options are key=value"
            )
        else:
            overrides.append(word)
    if faults:
        raise Refusal(faults)
    return Arguments(tuple(overrides), tuple(directories), found["sweep"], found["show"], found["help"])


Options = TypeVar("Options")
_WORDS: Mapping[str, bool | None] = {"null": None, "true": True, "false": False}


def read_options(command: str, schema: type[Options], overrides: Sequence[str]) -> Options:
    """A command's own options, which no plan holds, from ``key=value``.

    Args:
        command: its word, for messages.
        schema: a dataclass whose fields are made by ``gridtron.core.options.option``.
        overrides: as typed.

    Raises:
        Refusal: every unknown key and every value that does not fit.
    """
    known = {field.name: field for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    hints = get_type_hints(schema)
    values: dict[str, Any] = {}
    faults = []
    for word in overrides:
        key, equals, text = word.partition("=")
        if key not in known or not equals:
            what = f"{command} has no option {key}" if equals else "write key=value"
            faults.append(f"{word}: {what}; {nearest_choice(key, list(known))}")
            continue
        metadata = known[key].metadata
        value: Any = os.path.expanduser(text) if metadata.get("path") and text != "null" else _read_value(text)
        converted = convert(value, hints[key], metadata)
        if isinstance(converted, Violation):
            faults.append(converted.at(key, value).message)
        else:
            values[key] = converted
    if faults:
        raise Refusal(faults)
    return schema(**values)


def _read_value(text: str) -> Any:
    """Text as it would stand in YAML: null, true, false, a number, a list of them, or itself."""
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith("[") and text.endswith("]"):
        return [_read_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def print_refusal(refusal: Refusal) -> int:
    """Tells the user on standard error; returns the exit code of a wrong request, 2."""
    print(format_refusal(refusal), file=sys.stderr)
    return 2


def compose_or_exit_code(
    arguments: Sequence[str],
    launched: int | None = None,
    stored: Mapping[str, Any] | None = None,
    prepare: bool = True,
) -> Plan | int:
    """The plan that a command line asks for; or the exit code, when all is said: 2 refused, 0 help or ``--cfg job``.

    Args:
        arguments: after the command's word.
        launched: processes that a launcher started; None where none did.
        stored: the plan of a run that is continued (see ``gridtron.conf.compose.compose``).
        prepare: whether data is prepared as well, so that text that cannot be used is refused here too.
    """
    from gridtron.conf.compose import compose
    from gridtron.conf.rules import Surroundings

    try:
        parsed = parse_arguments(arguments)
        if parsed.help:
            return print_help("train")
        around = Surroundings.here(os.environ, launched)
        plan = compose(parsed.overrides, parsed.directories, stored, around)
        if parsed.show:
            return _print_plan(plan)
        if prepare:
            check_data(plan)
    except Refusal as refusal:
        return print_refusal(refusal)
    return plan


def check_data(plan: Plan) -> None:
    """Prepares the data of ``plan`` in the user's cache folder and holds its size against the plan.

    Raises:
        Refusal: text that cannot be used, a folder that cannot be written, too little text.
    """
    from gridtron.core.data.config import DataConfig

    if not isinstance(plan.data, DataConfig):
        return
    from gridtron.core.data.dataset import open_parts
    from gridtron.core.data.prepare import default_cache_folder, prepare_data
    from gridtron.core.data.sources import DataError

    try:
        prepared = prepare_data(plan.data, default_cache_folder(os.environ))
        vocab_size = getattr(plan.model, "vocab_size", None) or prepared.vocab_size
        parts = open_parts(prepared, plan.data, plan.train.sequence_length, vocab_size, plan.evaluation.every > 0)
        parts.training.check_start()
    except DataError as fault:
        raise Refusal([str(fault)]) from None


def _print_plan(plan: Plan) -> int:
    import yaml

    from gridtron.conf.schema import plan_to_dict

    print(yaml.safe_dump(plan_to_dict(plan), sort_keys=False, allow_unicode=True), end="")
    return 0
