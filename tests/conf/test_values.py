"""Values against types and bounds, with the nearest that fits."""

from typing import Any

import pytest

from gridtron.conf.values import Violation, convert, describe_type, show

NONE: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, int, 3),
        (1e3, int, 1000),
        (3, float, 3.0),
        (True, bool, True),
        ("x", str, "x"),
        (None, int | None, None),
        (4, int | None, 4),
        ([0.9, 1], tuple[float, float], (0.9, 1.0)),
        (["a"], list[str], ["a"]),
        ([], list[str], []),
        ({"a": 1}, dict[str, Any] | None, {"a": 1}),
        ("auto", str | int, "auto"),
        (2, str | int, 2),
        (2, Any, 2),
    ],
)
def test_fits(value, annotation, expected):
    converted = convert(value, annotation, NONE)
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        ("x", int, "needs an int"),
        (1.5, int, "needs an int; nearest: 2"),
        (True, int, "needs an int"),
        (float("nan"), float, "needs a float"),
        (float("inf"), float, "needs a float"),
        (False, float, "needs a float"),
        (None, int, "needs an int"),
        (1, bool, "needs true or false; nearest: true"),
        ("true", bool, "needs true or false"),
        (3, str, "needs text"),
        ([1.0], tuple[float, float], "needs a list of 2 floats"),
        ("ab", list[str], "needs a list of text; nearest: [ab]"),
        ([1], list[str], "needs a list of text"),
        ([1], dict[str, Any] | None, "needs a dictionary or null"),
        (1.5, int | None, "needs an int or null; nearest: 2"),
        ({}, str | int, "needs text or int"),
    ],
)
def test_does_not_fit(value, annotation, message):
    found = convert(value, annotation, NONE)
    assert isinstance(found, Violation) and found.message == message


@pytest.mark.parametrize(
    ("value", "metadata", "message"),
    [
        (-1, {"minimum": 0}, "must be at least 0"),
        (0, {"above": 0}, "must be above 0"),
        (1, {"below": 1}, "must be below 1"),
        (1.5, {"maximum": 1}, "must be at most 1"),
        ([0.9, 1.0], {"minimum": 0, "below": 1}, "must be below 1"),
        ("adam", {"choices": ("adamw", "sgd")}, "not one of adamw, sgd; nearest: adamw"),
        (3, {"choices": (0, 1)}, "not one of 0, 1; nearest: 1"),
    ],
)
def test_bounds(value, metadata, message):
    annotation = {int: int, float: float, str: str, list: tuple[float, float]}[type(value)]
    found = convert(value, annotation, metadata)
    assert isinstance(found, Violation) and found.message == message


@pytest.mark.parametrize(("value", "metadata"), [(0, {"minimum": 0}), (0.99, {"below": 1}), (1, {"maximum": 1})])
def test_bounds_are_inclusive_or_not(value, metadata):
    assert convert(value, float, metadata) == value


@pytest.mark.parametrize(
    ("annotation", "metadata", "words"),
    [
        (int | None, NONE, "int or null"),
        (str | None, {"path": True}, "path or null"),
        (str, {"choices": ("a", "b")}, "one of a, b"),
        (tuple[float, float], NONE, "list of 2 floats"),
        (dict[str, Any] | None, NONE, "dictionary or null"),
    ],
)
def test_types_in_words(annotation, metadata, words):
    assert describe_type(annotation, metadata) == words


def test_show():
    assert [show(value) for value in (None, True, [1, "a"], 0.5)] == ["null", "true", "[1,a]", "0.5"]
