"""The plan of a run: every option of every part in one frozen value, gathered from the dataclasses beside the parts."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from gridtron.conf.names import not_built_value, unknown_key
from gridtron.conf.refusal import Refusal
from gridtron.conf.values import Violation, convert, describe_type
from gridtron.core.checkpoint.config import CheckpointConfig
from gridtron.core.data.config import DataConfig
from gridtron.core.kernels.config import KernelsConfig
from gridtron.core.launch import LaunchConfig
from gridtron.core.layout import GridConfig
from gridtron.core.optim.config import LRScheduleConfig, OptimizerConfig
from gridtron.core.precision import PrecisionConfig
from gridtron.core.training.config import EvaluationConfig, LoggingConfig, RunConfig, TrainConfig
from gridtron.models.config import GPTConfig
from gridtron.parallel.data_parallel.config import DataParallelConfig
from gridtron.parallel.pipeline.config import PipelineConfig
from gridtron.parallel.recompute import RecomputeConfig

PLUGIN_KEY = "plugin"
"""In a section's dictionary: the name under which a plugin registered the section's dataclass."""

CHOICES_KEY = "choices"
"""In the dictionary of a whole plan: the option files that were chosen, group -> name."""


@dataclass(frozen=True)
class Plan:
    """All options of a run. Below the command line nothing else is configuration.

    ``model``, ``optimizer``, ``lr_schedule`` and ``data`` hold a plugin's own dataclass where one was chosen by name
    (``model=NAME``); ``parts`` then maps the section to that name. ``callbacks`` and ``loggers`` map the names that
    plugins registered to their dataclasses. ``choices`` remembers which option files were chosen, group -> name:
    choosing the same again when a run is continued changes nothing.
    """

    run: RunConfig = field(default_factory=RunConfig)
    grid: GridConfig = field(default_factory=GridConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    model: GPTConfig = field(default_factory=GPTConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    plugins: tuple[str, ...] = ()
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    loggers: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict, compare=False)


SECTIONS: Mapping[str, type] = {
    name: schema
    for name, schema in typing.get_type_hints(Plan).items()
    if isinstance(schema, type) and dataclasses.is_dataclass(schema)
}
"""Section of the plan -> its dataclass."""

PART_SECTIONS: Mapping[str, str] = {"callbacks": "callback", "loggers": "logger"}
"""Sections that hold parts registered by plugins under their names -> the kind of those parts."""

PLUGIN_KINDS = ("model", "data", "optimizer", "lr_schedule", *PART_SECTIONS.values())


@dataclass(frozen=True)
class Option:
    """One key of the configuration.

    Args:
        key: ``section.name``.
        annotation: its type.
        default: of a plan without overrides.
        meaning: one line, with units.
        metadata: bounds and choices, as given to ``gridtron.core.options.option``.
    """

    key: str
    annotation: Any
    default: Any
    meaning: str
    metadata: Mapping[str, Any]

    @property
    def is_path(self) -> bool:
        return bool(self.metadata.get("path"))

    @property
    def type_name(self) -> str:
        return describe_type(self.annotation, self.metadata)


def section_options(section: str, schema: type) -> Iterator[Option]:
    """The options of one dataclass; ``section`` is the prefix of their keys."""
    annotations = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        meaning = item.metadata.get("meaning", "")
        yield Option(f"{section}.{item.name}", annotations[item.name], default, meaning, item.metadata)


def all_options(schemas: Mapping[str, type] = SECTIONS) -> dict[str, Option]:
    """Every key of the configuration, in the order of the plan."""
    found = {entry.key: entry for section, schema in schemas.items() for entry in section_options(section, schema)}
    meaning = "modules to import that register own models, data, optimizers, schedules, callbacks or loggers"
    found["plugins"] = Option("plugins", list[str], [], meaning, {})
    return found


def check_option(entry: Option, value: Any) -> Any | Violation:
    """``value`` as the option holds it, or what is wrong with it."""
    unbuilt = not_built_value(entry.key, value)
    found = Violation(unbuilt) if unbuilt else convert(value, entry.annotation, entry.metadata)
    return found.at(entry.key, value) if isinstance(found, Violation) else found


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain dictionaries, lists, strings and numbers: what YAML and JSON can hold."""
    result: dict[str, Any] = {}
    for section in SECTIONS:
        chosen = {PLUGIN_KEY: plan.parts[section]} if section in plan.parts else {}
        result[section] = chosen | _plain(getattr(plan, section))
    result["plugins"] = list(plan.plugins)
    for section in PART_SECTIONS:
        parts = getattr(plan, section)
        if parts:
            result[section] = {name: _plain(part) for name, part in parts.items()}
    if plan.choices:
        result[CHOICES_KEY] = dict(plan.choices)
    return result


def plan_from_dict(values: Mapping[str, Any]) -> Plan:
    """The plan that :func:`plan_to_dict` wrote, checked again; keys left out take their defaults.

    Modules named under ``plugins`` are imported first, when the dictionary holds parts of theirs.

    Raises:
        Refusal: a ValueError that lists every unknown key and every value that does not fit.
    """
    from gridtron.conf.plugins import Registry, load_plugins

    modules = values.get("plugins") or []
    registry = load_plugins(modules) if modules else Registry()
    plan, violations = build_plan(values, registry)
    if violations:
        raise Refusal([violation.message for violation in violations])
    return plan


def build_plan(values: Mapping[str, Any], registry: Any) -> tuple[Plan, list[Violation]]:
    """A plan from nested dictionaries, and what does not fit; a part that does not fit keeps its default."""
    violations: list[Violation] = []
    sections: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    known = list(all_options(schemas_of(values, registry)))
    for section, content in values.items():
        if section in SECTIONS and isinstance(content, Mapping):
            schema = section_schema(section, content, registry)
            plain = {name: value for name, value in content.items() if name != PLUGIN_KEY}
            sections[section] = _build_section(section, schema, plain, known, violations)
            if schema is not SECTIONS[section]:
                chosen[section] = content[PLUGIN_KEY]
            elif PLUGIN_KEY in content:
                violations.append(_unknown_part(section, content[PLUGIN_KEY], registry))
        elif section in PART_SECTIONS:
            parts = registry.parts(PART_SECTIONS[section])
            sections[section] = _build_parts(section, parts, content or {}, violations)
        elif section == "plugins":
            modules = convert(content or [], list[str], {})
            if isinstance(modules, Violation):
                violations.append(modules.at("plugins", content))
            else:
                sections[section] = tuple(modules)
        elif section == CHOICES_KEY and isinstance(content, Mapping):
            sections[section] = {str(group): str(name) for group, name in content.items() if name is not None}
        elif section in SECTIONS:
            message = f"{section}={content!r}: {section} is a group of options; write {section}.NAME=VALUE"
            violations.append(Violation(message, {section}))
        else:
            violations.append(Violation(unknown_key(section, known), {section}))
    return Plan(**sections, parts=chosen), violations


def schemas_of(values: Mapping[str, Any], registry: Any) -> dict[str, type]:
    """Section -> dataclass, with the dataclasses of the plugins that ``values`` choose."""
    schemas = {}
    for section, schema in SECTIONS.items():
        content = values.get(section)
        schemas[section] = section_schema(section, content, registry) if isinstance(content, Mapping) else schema
    for section, kind in PART_SECTIONS.items():
        schemas.update({f"{section}.{name}": part.schema for name, part in registry.parts(kind).items()})
    return schemas


def section_schema(section: str, content: Mapping[str, Any], registry: Any) -> type:
    """The dataclass of a section: this project's, or the one of the plugin it names."""
    chosen = content.get(PLUGIN_KEY)
    if chosen is None:
        return SECTIONS[section]
    part = registry.parts(section).get(chosen)
    return part.schema if part is not None else SECTIONS[section]


def _unknown_part(section: str, name: Any, registry: Any) -> Violation:
    registered = ", ".join(registry.parts(section)) or "none"
    return Violation(
        f"{section}.{PLUGIN_KEY}={name}: no module under plugins= registers a {section} of that name (registered: "
        f"{registered}); add the module, as in plugins=[my_module]", {section},
    )  # fmt: skip


def _build_section(
    section: str, schema: type, content: Mapping[str, Any], known: list[str], violations: list[Violation]
) -> Any:
    options = {entry.key.removeprefix(f"{section}."): entry for entry in section_options(section, schema)}
    values = {}
    for name, value in content.items():
        key = f"{section}.{name}"
        if name not in options:
            violations.append(Violation(unknown_key(key, known), {key}))
            continue
        converted = check_option(options[name], value)
        if isinstance(converted, Violation):
            violations.append(converted)
        else:
            values[name] = converted
    return schema(**values)


def _build_parts(
    section: str, parts: Mapping[str, Any], content: Mapping[str, Any], violations: list[Violation]
) -> dict[str, Any]:
    built = {}
    for name, values in content.items():
        key = f"{section}.{name}"
        if name not in parts:
            violations.append(Violation(unknown_key(key, [f"{section}.{part}" for part in parts]), {key}))
            continue
        known = [entry.key for entry in section_options(key, parts[name].schema)]
        built[name] = _build_section(key, parts[name].schema, values or {}, known, violations)
    return built


def _plain(config: Any) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
