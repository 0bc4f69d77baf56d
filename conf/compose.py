"""From overrides to a frozen plan, or to a list of everything that is wrong with them; nothing is started.

Hydra alone reports the first error only, takes ``+train.micro_batchsize=4`` for a new key, and stumbles over ``~`` and
commas in paths. So every override is held against the schema first, and the composed result once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridtron.conf.files import ConfigFiles
from gridtron.conf.overrides import CheckedOverrides, check_overrides
from gridtron.conf.plugins import Registry, load_builder, load_plugins
from gridtron.conf.refusal import Refusal
from gridtron.conf.rules import Surroundings, check_rules
from gridtron.conf.schema import (
    CHOICES_KEY,
    PART_SECTIONS,
    PLUGIN_KEY,
    SECTIONS,
    Plan,
    all_options,
    build_plan,
    plan_to_dict,
    schemas_of,
)
from gridtron.conf.values import Violation
from gridtron.conf.warm_start import source_violations, take_model

__all__ = ["Refusal", "check_request", "compose"]


def compose(
    overrides: Sequence[str],
    config_directories: Sequence[str] = (),
    stored: Mapping[str, Any] | None = None,
    surroundings: Surroundings | None = None,
) -> Plan:
    """The plan that ``overrides`` ask for.

    Args:
        overrides: ``key=value`` and ``group=file``, as typed.
        config_directories: folders of option files, searched first; then ``./conf`` where it holds groups, then this
            package's.
        stored: the plan of a run that is continued, as its config.yaml holds it: the overrides go on top of it, and
            choosing an option file that it was made with changes nothing.
        surroundings: machine and launcher; default: this machine without a launcher.

    Raises:
        Refusal: a ValueError with every violation.
    """
    request = check_request(overrides, config_directories, stored)
    violations = list(request.checked.violations)
    plan = Plan()
    try:
        values = request.compose()
    except Refusal as refusal:
        violations += [Violation(line) for line in refusal.violations]
    else:
        if stored is None:
            violations += take_model(values, *request.model_by_hand())
        plan, faults = build_plan(values, request.registry)
        violations += [request.files.with_place(fault, plan.choices) for fault in faults]
        plan, more = _finish(plan)
        violations += more
        if stored is None and not violations:
            violations += source_violations(plan)
        violations += _independent(check_rules(plan, surroundings or Surroundings.here({})), violations)
    if violations:
        raise Refusal(list(dict.fromkeys(violation.message for violation in violations)))
    return plan


def _independent(found: list[Violation], before: list[Violation]) -> list[Violation]:
    """Violations that are not about a key which is refused already: its default would be judged, not what was asked."""
    refused = {key for violation in before for key in violation.keys}
    return [violation for violation in found if not violation.keys & refused]


@dataclass(frozen=True)
class Request:
    """Overrides that were held against the schema, and what is needed to compose them.

    Args:
        checked: the overrides.
        files: where option files are looked for.
        registry: what plugins registered.
        stored: the plan of a run that is continued.
        parts: sections for which the command line or the experiment picks a registered part.
        experiment: the content of the experiment's file.
    """

    checked: CheckedOverrides
    files: ConfigFiles
    registry: Registry
    stored: Mapping[str, Any] | None
    parts: frozenset[str]
    experiment: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def model_by_hand(self) -> tuple[set[str], bool]:
        """Options of the model that the command line or the experiment sets; whether all of them were picked."""
        keys = [written.lstrip("+").partition("=")[0] for written in self.checked.accepted]
        given = {key.split(".")[1] for key in keys if key.startswith("model.")}
        section = self.experiment.get("model")
        return given | (set(section) if isinstance(section, Mapping) else set()), "model" in self.checked.groups

    def compose(self) -> dict[str, Any]:
        """Nested dictionaries of every option, from the accepted overrides.

        Raises:
            Refusal: option files that cannot be composed.
        """
        base = self.base() if self.stored is None else self._stored_base(self.stored)
        chosen = {} if self.stored is not None else self.checked.groups
        values = self.files.compose(base, chosen, self.checked.accepted, groups=self.stored is None)
        if self.stored is not None:
            values[CHOICES_KEY] = {**self.stored.get(CHOICES_KEY, {}), **self.checked.groups}
        for part in self.checked.parts:
            section, _, name = part.partition(".")
            values.get(section, {}).pop(name, None)
        return values

    def base(self) -> dict[str, Any]:
        """The default of every option, those of registered callbacks and loggers included."""
        base = plan_to_dict(Plan())
        for section in self.parts:  # the registered part brings its own
            del base[section]
        for section, kind in PART_SECTIONS.items():
            parts = {name: dataclasses.asdict(part.schema()) for name, part in self.registry.parts(kind).items()}
            if parts:
                base[section] = parts
        return base

    def _stored_base(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """The stored plan, with the option files on top that are not those it was made with."""
        before = stored.get(CHOICES_KEY, {})
        fresh = {group: name for group, name in self.checked.groups.items() if before.get(group) != name}
        result = {key: value for key, value in stored.items() if key != CHOICES_KEY}
        for section in SECTIONS:  # an option that a later version added takes its default
            if PLUGIN_KEY not in result.get(section, {}):
                result[section] = plan_to_dict(Plan())[section] | dict(result.get(section, {}))
        if not fresh:
            return result
        plain = self.files.compose(self.base(), {}, [])
        wanted = self.files.compose(self.base(), fresh, [])
        if "experiment" in fresh:
            _put_changes(result, plain, wanted)
        for group in fresh:
            if group in SECTIONS:
                result[group] = wanted[group]
        return result


def _put_changes(target: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for key, value in after.items():
        if isinstance(value, Mapping) and isinstance(before.get(key), Mapping) and isinstance(target.get(key), dict):
            _put_changes(target[key], before[key], value)
        elif value != before.get(key) and key != CHOICES_KEY:
            target[key] = value


def check_request(
    overrides: Sequence[str],
    config_directories: Sequence[str] = (),
    stored: Mapping[str, Any] | None = None,
    sweep: bool = False,
) -> Request:
    """Holds overrides against the schema, with the plugins that they or the stored plan name.

    Raises:
        Refusal: plugins that cannot be loaded, or a configuration folder that is not there.
    """
    files = ConfigFiles.find(config_directories)
    files, registry = _load_plugins(files, overrides, stored)
    choices = files.chosen_parts(overrides, registry)
    parts = frozenset(choices)
    if stored is not None:
        kept = {section: values for section, values in stored.items() if section in SECTIONS and section not in choices}
        choices = {**kept, **choices}
    options = all_options(schemas_of(choices, registry))
    groups = files.groups({section: registry.parts(section) for section in SECTIONS})
    checked = check_overrides(overrides, options, groups, sweep)
    return Request(checked, files, registry, stored, parts, files.experiment(overrides))


def _load_plugins(
    files: ConfigFiles, overrides: Sequence[str], stored: Mapping[str, Any] | None
) -> tuple[ConfigFiles, Registry]:
    modules = files.plugin_modules(overrides)
    if modules is None:
        modules = list((stored or {}).get("plugins") or [])
    registry = load_plugins(modules)
    parts = {section: registry.parts(section) for section in SECTIONS}
    defaults = {
        (section, name): {PLUGIN_KEY: name, **dataclasses.asdict(part.schema())}
        for section, registered in parts.items()
        for name, part in registered.items()
    }
    return dataclasses.replace(files, parts=defaults), registry


def _finish(plan: Plan) -> tuple[Plan, list[Violation]]:
    """What needs a look outside the plan: the model's own builder, and the size of the vocabulary."""
    violations = []
    target = getattr(plan.model, "build", None)
    if target is not None:
        try:
            load_builder(target)
        except ValueError as fault:
            violations.append(Violation(str(fault), {"model.build"}))
    if not hasattr(plan.model, "vocab_size") or not hasattr(plan.data, "tokenizer"):
        return plan, violations
    from gridtron.core.data.sources import DataError
    from gridtron.core.data.tokenizers import load_tokenizer

    try:
        needed = load_tokenizer(plan.data.tokenizer).vocab_size
    except DataError as fault:
        return plan, [*violations, Violation(str(fault), {"data.tokenizer"})]
    if plan.model.vocab_size is None:
        plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, vocab_size=needed))
    elif plan.model.vocab_size < needed:
        message = (
            f"model.vocab_size={plan.model.vocab_size}: data.tokenizer={Path(plan.data.tokenizer).name} has {needed} "
            f"ids; nearest: model.vocab_size={needed}, or null to take it from there"
        )
        violations.append(Violation(message, {"model.vocab_size", "data.tokenizer"}))
    return plan, violations
