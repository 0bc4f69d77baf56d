"""Whether a value fits an option: its type, its bounds, its choices; and the nearest value that does."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One thing wrong with a request.

    Args:
        message: one line: what was asked, the rule, the nearest that fits.
        keys: the options it is about.
    """

    message: str
    keys: frozenset[str] = field(default_factory=frozenset)

    def __init__(self, message: str, keys: Iterable[str] = ()):
        object.__setattr__(self, "message", message)
        object.__setattr__(self, "keys", frozenset(keys))

    def at(self, key: str, value: Any) -> Violation:
        """The same, said of the option ``key`` that was given ``value``."""
        return Violation(f"{key}={show(value)}: {self.message}", {key})


def show(value: Any) -> str:
    """A value as a person would type it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(item) for item in value) + "]"
    return str(value)


def describe_type(annotation: Any, metadata: Mapping[str, Any]) -> str:
    """The type of an option in words: "int", "float or null", "one of cosine, linear"."""
    words = [_type_word(part) for part in _alternatives(annotation)]
    if metadata.get("choices"):
        words[0] = "one of " + ", ".join(show(choice) for choice in metadata["choices"])
    elif metadata.get("path"):
        words[0] = "path"
    return " or ".join(words)


def convert(value: Any, annotation: Any, metadata: Mapping[str, Any]) -> Any | Violation:
    """``value`` as the option's type holds it, or what is wrong with it.

    Whole numbers serve as floats, and floats without a fraction (1e3) as ints.
    """
    for part in _alternatives(annotation):
        converted = _convert_one(value, part)
        if converted is not _MISFIT:
            return _check_bounds(converted, metadata) or converted
    wanted = describe_type(annotation, metadata)
    nearest = _nearest_text(value, annotation, metadata)
    return Violation(f"needs {_article(wanted)}{nearest}")


_MISFIT = object()


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _type_word(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return f"list of {_type_word(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} {_type_word(arguments[0])}s"
    if origin is dict:
        return "dictionary"
    return {bool: "true or false", str: "text"}.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _article(wanted: str) -> str:
    if wanted.startswith(("one of", "null", "text", "true")):
        return wanted
    return f"{'an' if wanted[0] in 'aeiou' else 'a'} {wanted}"


def _convert_one(value: Any, annotation: Any) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if annotation is type(None):
        return None if value is None else _MISFIT
    if annotation is bool:
        return value if isinstance(value, bool) else _MISFIT
    if annotation in (int, float):
        return _convert_number(value, annotation)
    if annotation is str:
        return value if isinstance(value, str) else _MISFIT
    if origin is dict:
        return dict(value) if isinstance(value, Mapping) else _MISFIT
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        item_types = arguments if origin is tuple else (arguments[0],) * len(value)
        if len(item_types) == 2 and item_types[1] is Ellipsis:
            item_types = (item_types[0],) * len(value)
        if len(item_types) != len(value):
            return _MISFIT
        items = [_convert_one(item, kind) for item, kind in zip(value, item_types, strict=True)]
        return _MISFIT if any(item is _MISFIT for item in items) else origin(items)
    return _MISFIT


def _convert_number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _MISFIT
    if kind is float:
        return float(value) if math.isfinite(value) else _MISFIT
    if isinstance(value, float) and not value.is_integer():
        return _MISFIT
    return int(value)


def _check_bounds(value: Any, metadata: Mapping[str, Any]) -> Violation | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return next((found for item in value if (found := _check_bounds(item, metadata))), None)
    choices = metadata.get("choices")
    if choices and value not in choices:
        close = _closest(value, choices)
        return Violation(f"not one of {', '.join(show(choice) for choice in choices)}; nearest: {show(close)}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    bounds = (
        ("minimum", value < metadata["minimum"] if metadata.get("minimum") is not None else False, "at least"),
        ("maximum", value > metadata["maximum"] if metadata.get("maximum") is not None else False, "at most"),
        ("above", value <= metadata["above"] if metadata.get("above") is not None else False, "above"),
        ("below", value >= metadata["below"] if metadata.get("below") is not None else False, "below"),
    )
    for name, broken, words in bounds:
        if broken:
            return Violation(f"must be {words} {show(metadata[name])}")
    return None


def _closest(value: Any, choices: tuple[Any, ...]) -> Any:
    if isinstance(value, (int, float)):
        numbers = [choice for choice in choices if isinstance(choice, (int, float))]
        if numbers:
            return min(numbers, key=lambda choice: abs(choice - value))
    by_text = {show(choice): choice for choice in choices}
    close = difflib.get_close_matches(str(value).lower(), by_text, 1, 0)
    return by_text[close[0]] if close else choices[0]


def _nearest_text(value: Any, annotation: Any, metadata: Mapping[str, Any]) -> str:
    """For a value of the wrong type: the nearest of the right one, where there is one."""
    kinds = _alternatives(annotation)
    if isinstance(value, float) and math.isfinite(value) and int in kinds and not isinstance(value, bool):
        return f"; nearest: {round(value)}"
    if isinstance(value, str) and metadata.get("choices"):
        return f"; nearest: {show(_closest(value, metadata['choices']))}"
    if any(typing.get_origin(kind) is list for kind in kinds) and isinstance(value, (str, int)):
        return f"; nearest: [{show(value)}]"
    if bool in kinds and value in (0, 1):
        return f"; nearest: {show(bool(value))}"
    return ""
