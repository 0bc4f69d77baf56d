"""One override of the command line, read by Hydra's grammar and held against the schema."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from gridtron.conf.names import is_misspelling, nearest_choice, nearest_key, not_built_value, unknown_key
from gridtron.conf.schema import PART_SECTIONS, Option, check_option
from gridtron.conf.values import Violation

_DICTIONARY_KEYS = ("model.rope_scaling",)
"""Options that hold dictionaries: a deeper key sets an entry, any of them."""


@dataclass
class CheckedOverrides:
    """What the command line asked for, as far as it is understood.

    Args:
        accepted: overrides for Hydra's compose, the right ones and the ones whose meaning is plain (a misspelled key
            replaced by the nearest): with violations nothing runs, and the rules across groups can still be told.
        violations: what is wrong.
        hydra: overrides of Hydra's own settings, which a sweep takes.
        groups: option files that were chosen, group -> name (of a sweep the last one), not in ``accepted``.
        parts: names of callbacks and loggers that are left out, ``callbacks.NAME``.
    """

    accepted: list[str] = field(default_factory=list)
    groups: dict[str, str | None] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)


def check_overrides(
    overrides: Sequence[str],
    options: Mapping[str, Option],
    groups: Mapping[str, Sequence[str]],
    sweep: bool = False,
) -> CheckedOverrides:
    """Reads every override and collects every fault.

    Args:
        overrides: ``key=value``, as typed.
        options: every key there is.
        groups: every group and its option files.
        sweep: several values (``1,2``) are wanted.
    """
    result = CheckedOverrides()
    for written in overrides:
        _check_one(written, options, groups, sweep, result)
    return result


def quote_path(written: str, options: Mapping[str, Option], sweep: bool = False) -> str:
    """An override of a path-typed key with its value quoted for Hydra's grammar and its ~ expanded; others as they are.

    A value that the user quoted for Hydra stays one string. In a sweep an unquoted comma parts two paths.
    """
    key, equals, value = written.partition("=")
    entry = options.get(key.lstrip("+"))
    if not equals or entry is None or not entry.is_path or value in ("", "null"):
        return f"{key}=''" if equals and value == "" and entry is not None and entry.is_path else written
    unquoted = _unquoted(value)
    if unquoted is not None:
        return f"{key}={quote_text(os.path.expanduser(unquoted))}"
    if sweep and "," in value:
        return f"{key}=" + ",".join(quote_text(os.path.expanduser(part)) for part in value.split(","))
    return f"{key}={quote_text(os.path.expanduser(value))}"


def _unquoted(value: str) -> str | None:
    """The text of a value that is one string in Hydra's quotes; None for any other."""
    if len(value) < 2 or value[0] != value[-1] or value[0] not in "'\"":
        return None
    try:
        parsed = OverridesParser.create().parse_rule(value, "value")
    except HydraException:
        return None
    return parsed.text if isinstance(parsed, QuotedString) else None


def quote_text(text: str) -> str:
    """Text as one string of Hydra's grammar."""
    return QuotedString(text, Quote.single).with_quotes()


def _check_one(
    written: str,
    options: Mapping[str, Option],
    groups: Mapping[str, Sequence[str]],
    sweep: bool,
    result: CheckedOverrides,
) -> None:
    if "=" not in written and not written.startswith("~"):
        result.violations.append(_bare_word(written, options, groups))
        return
    try:
        override = OverridesParser.create().parse_override(quote_path(written, options, sweep))
    except HydraException as fault:
        result.violations.append(_unreadable(written, fault, options))
        return
    key = override.key_or_group
    if key.startswith(("hydra.", "hydra/")) or key == "hydra":
        _check_hydra(written, key, sweep, result)
    elif override.is_delete():
        _check_delete(written, key, options, result)
    elif override.package is not None:
        result.violations.append(
            Violation(f"{written}: groups stand at their own place; write {key}={override.value()}", {key})
        )
    elif key in groups:
        _check_group(written, override, groups[key], sweep, result)
    elif key in options or key.startswith(tuple(f"{name}." for name in _DICTIONARY_KEYS)):
        _check_value(override, options, sweep, result)
    else:
        result.violations.append(Violation(unknown_key(key, [*options, *groups], written), {key}))
        nearest = nearest_key(key, options)
        if nearest is not None and is_misspelling(key, nearest):
            meant = f"{nearest}={written.partition('=')[2]}"
            attempt = check_overrides([meant], options, groups, sweep)
            result.accepted += [] if attempt.violations else attempt.accepted


def _bare_word(written: str, options: Mapping[str, Option], groups: Mapping[str, Sequence[str]]) -> Violation:
    for group, names in groups.items():
        if written in names:
            return Violation(f"{written}: write {group}={written}")
    if written.startswith("-"):
        return Violation(
            f"{written}: no such flag; there are -m, --cfg job, --config-dir FOLDER, --help; options are key=value"
        )
    if written in options or (nearest := nearest_key(written, options)) is None:
        return Violation(f"{written}: write key=value, as in {written if written in options else 'train.steps'}=...")
    return Violation(f"{written}: write key=value; nearest: {nearest}=...")


def _unreadable(written: str, fault: Exception, options: Mapping[str, Option]) -> Violation:
    key = written.partition("=")[0]
    reason = re.sub(r"\s+", " ", str(fault).splitlines()[0])[:100]
    hint = "quote a value with special characters: " + f"'{key}=\"...\"'"
    unknown = "" if key.lstrip("+~") in options else f" (and {unknown_key(key.lstrip('+~'), options)})"
    return Violation(f"{written}: cannot be read ({reason}); {hint}{unknown}", {key.lstrip("+~")})


def _check_hydra(written: str, key: str, sweep: bool, result: CheckedOverrides) -> None:
    if sweep:
        result.hydra.append(written)
    else:
        result.violations.append(
            Violation(f"{written}: Hydra's own settings serve a sweep (-m) only; leave it out", {key})
        )


def _check_delete(written: str, key: str, options: Mapping[str, Option], result: CheckedOverrides) -> None:
    section, _, name = key.partition(".")
    if section in PART_SECTIONS and name and any(option.startswith(f"{key}.") for option in options):
        result.parts.append(key)
    elif section in PART_SECTIONS:
        named = sorted({option.split(".")[1] for option in options if option.startswith(f"{section}.")})
        result.violations.append(Violation(f"{written}: no plugin registered it; {nearest_choice(name, named)}", {key}))
    else:
        result.violations.append(
            Violation(f"{written}: an option cannot be taken away; set it, as in {key}=VALUE", {key})
        )


def _check_group(written: str, override: Override, names: Sequence[str], sweep: bool, result: CheckedOverrides) -> None:
    group = override.key_or_group
    values = _values(override, written, sweep, result)
    if values is None:
        return
    faults = [value for value in values if value not in names and not (value is None and group == "experiment")]
    for value in faults:
        unbuilt = not_built_value(f"{group}.mode", value)
        if unbuilt:
            result.violations.append(Violation(f"{group}={value}: {unbuilt}", {group}))
        elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
            result.violations.append(
                Violation(f"{group}={value}: no such file in {group}/; {nearest_choice(value, names)}", {group})
            )
        else:
            result.violations.append(
                Violation(f"{written}: name one file of {group}/; {nearest_choice('', names)}", {group})
            )
    if not faults:
        result.groups[group] = None if values[-1] is None else str(values[-1])


def _check_value(override: Override, options: Mapping[str, Option], sweep: bool, result: CheckedOverrides) -> None:
    key = override.key_or_group
    values = _values(override, override.input_line or key, sweep, result)
    if values is None:
        return
    if key not in options:  # an entry of a dictionary: added to what is there
        result.accepted.append(f"++{key}={_text(override)}")
        return
    if any(isinstance(value, str) and "${" in value for value in values):  # known only once composed
        result.accepted.append(f"{key}={_text(override)}")
        return
    checked = [check_option(options[key], value) for value in values]
    faults = [found for found in checked if isinstance(found, Violation)]
    result.violations += faults
    if faults:
        return
    text = _text(override)
    if any(isinstance(value, dict) for value in values):
        # Hydra would merge a dictionary into the one that a file sets; an option's value replaces the one before.
        result.accepted += [f"{key}=null", f"++{key}={text}"]
    else:
        result.accepted.append(f"{key}={text}")


def _values(override: Override, written: str, sweep: bool, result: CheckedOverrides) -> list[Any] | None:
    """Every value that the override may give; several only in a sweep."""
    if not override.is_sweep_override():
        return [override.value()]
    if not sweep:
        result.violations.append(
            Violation(f"{written}: several values are a sweep; add -m, or give one value", {override.key_or_group})
        )
        return None
    if not override.is_discrete_sweep():
        result.violations.append(
            Violation(f"{written}: a sweep lists its values, as in 1,2,4", {override.key_or_group})
        )
        return None
    return [item.text if isinstance(item, QuotedString) else item for item in override.sweep_iterator()]


def _text(override: Override) -> str:
    """The value as it stands in the (quoted) override."""
    return (override.input_line or "").partition("=")[2]
