"""Parts of a user's own in a run: modules that register dataclasses and builders by kind.

A plugin is a module with a function ``register(registry)``::

    @dataclass(frozen=True)
    class MyModelConfig:
        width: int = option(32, "width of the one layer", minimum=1)
        vocab_size: int | None = option(None, "null: the tokenizer's")

    def build(config: MyModelConfig, grid: Grid) -> nn.Module: ...

    def register(registry):
        registry.add("model", "my_model", MyModelConfig, build)

and then ``gridtron train plugins=[my_module] model=my_model model.width=64``. Callbacks and loggers that are registered
run with their defaults; ``callbacks.NAME.KEY=VALUE`` sets an option, ``~callbacks.NAME`` leaves one out.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gridtron.conf.names import nearest_choice
from gridtron.conf.refusal import Refusal
from gridtron.conf.schema import PLUGIN_KINDS, section_options
from gridtron.conf.values import Violation, convert, show

ENTRY_POINT_GROUP = "gridtron.plugins"


@dataclass(frozen=True)
class Part:
    """What a plugin registers.

    Args:
        schema: a frozen dataclass; its fields are the options.
        build: called as ``build(config, grid)`` on every rank.
    """

    schema: type
    build: Callable[..., Any]


@dataclass
class Registry:
    """The parts that the plugins of one plan registered, by kind and name."""

    _parts: dict[str, dict[str, Part]] = field(default_factory=dict)

    def add(self, kind: str, name: str, schema: type, build: Callable[..., Any]) -> None:
        """Registers a part.

        Args:
            kind: model, data, optimizer, lr_schedule, callback or logger.
            name: what the user writes, as in ``model=NAME``.
            schema: the dataclass of its options, each with a default.
            build: ``build(config, grid)``.

        Raises:
            ValueError: an unknown kind, a name taken, or a schema or builder that cannot serve.
        """
        if kind not in PLUGIN_KINDS:
            raise ValueError(f"kind={kind!r} of part {name!r}: {nearest_choice(kind, PLUGIN_KINDS)}")
        if not name.isidentifier():
            raise ValueError(f"{kind} {name!r}: a name is made of letters, digits and _")
        if name in self._parts.get(kind, {}):
            raise ValueError(f"{kind} {name!r} is registered twice; give one of them another name")
        fault = _schema_fault(schema) or _missing_field(kind, schema) or signature_fault(build)
        if fault:
            raise ValueError(f"{kind} {name!r}: {fault}")
        self._parts.setdefault(kind, {})[name] = Part(schema, build)

    def parts(self, kind: str) -> Mapping[str, Part]:
        """Name -> part, of one kind."""
        return self._parts.get(kind, {})

    def builder(self, kind: str, name: str) -> Callable[..., Any]:
        """The builder registered under ``name``."""
        return self._parts[kind][name].build


def load_plugins(modules: Iterable[str], entry_points: bool = True) -> Registry:
    """Imports modules, and installed distributions' entry points, and collects what they register.

    The working directory is importable, as under ``python -m``. Every rank calls this with the plan's ``plugins``.

    Raises:
        Refusal: a module that cannot be imported or does not register, with what to change; all of them at once.
    """
    registry, faults = Registry(), []
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in modules:
        faults += _register(f"plugins=[{name}]", partial(importlib.import_module, name), registry)
    if entry_points:
        from importlib.metadata import entry_points as installed

        for point in installed(group=ENTRY_POINT_GROUP):
            faults += _register(f"installed plugin {point.name} ({point.value})", point.load, registry)
    if faults:
        raise Refusal(faults)
    return registry


def _register(described: str, load: Callable[[], Any], registry: Registry) -> list[str]:
    try:
        module = load()
    except ModuleNotFoundError as fault:
        return [f"{described}: no module {fault.name!r}; give a module that Python can import from here (NAME.py in "
                "the working directory is one) or install it"]  # fmt: skip
    except Exception as fault:
        return [f"{described}: importing it fails with {_brief(fault)}; correct the module"]
    register = module if callable(module) else getattr(module, "register", None)
    if not callable(register):
        return [f"{described}: it has no function register(registry); add one that calls registry.add(...)"]
    try:
        register(registry)
    except Exception as fault:
        return [f"{described}: its register(registry) fails with {_brief(fault)}; correct the module"]
    return []


def load_builder(target: str) -> Callable[..., Any]:
    """The function that ``model.build=my_package.models:build`` names.

    Raises:
        ValueError: not of that form, not importable, not callable with (config, grid); says what to change.
    """
    module_name, colon, name = target.partition(":")
    if not (colon and module_name and name):
        raise ValueError(f"model.build={target}: write MODULE:FUNCTION, as in my_package.models:build")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as fault:
        raise ValueError(
            f"model.build={target}: no module {fault.name!r}; give one that Python can import from here"
        ) from fault
    except Exception as fault:
        raise ValueError(f"model.build={target}: importing {module_name} fails with {_brief(fault)}") from fault
    build = getattr(module, name, None)
    if build is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"model.build={target}: {module_name} has no {name}; {nearest_choice(name, functions)}")
    unfit = signature_fault(build)
    if unfit:
        raise ValueError(f"model.build={target}: {unfit}")
    return build


def signature_fault(build: Any) -> str | None:
    """Why ``build`` cannot be called as ``build(config, grid)``; None where it can."""
    if not callable(build):
        return f"{build!r} is not callable; a builder is a function (config, grid)"
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # some built-in callables tell no signature: then the call itself shows
        return None
    try:
        signature.bind(None, None)
    except TypeError:
        name = getattr(build, "__name__", build)
        return f"{name}{signature} cannot be called as (config, grid); give it these two arguments"
    return None


def _schema_fault(schema: Any) -> str | None:
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
        return f"{schema!r} is not a dataclass; options are the fields of one"
    try:
        schema()
    except TypeError as fault:
        return f"{schema.__name__}() needs a default for each field ({fault})"
    except Exception as fault:
        return f"{schema.__name__}() fails with {_brief(fault)}"
    try:
        options = list(section_options(schema.__name__, schema))
    except Exception as fault:
        return f"the types of {schema.__name__} cannot be read: {_brief(fault)}"
    for entry in options:
        if isinstance(found := convert(entry.default, entry.annotation, entry.metadata), Violation):
            return f"the default {entry.key}={show(entry.default)} does not fit: {found.message}"
    return None


def _missing_field(kind: str, schema: type) -> str | None:
    """The loop multiplies the schedule with the optimizer's ``lr``: every optimizer has one."""
    if kind == "optimizer" and "lr" not in {item.name for item in dataclasses.fields(schema)}:
        return f"{schema.__name__} has no field lr, the rate that the schedule scales; add one"
    return None


def _brief(fault: BaseException) -> str:
    text = (str(fault).strip().splitlines() or [""])[0]
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__
