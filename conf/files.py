"""Folders of option files, and Hydra's composition over them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gridtron.conf.refusal import Refusal
from gridtron.conf.schema import CHOICES_KEY, PLUGIN_KEY, SECTIONS
from gridtron.conf.values import Violation

PACKAGE = Path(__file__).parent
"""This package's own option files."""

_PRIMARY = "gridtron_primary"


@dataclass(frozen=True)
class ConfigFiles:
    """Where option files are looked for.

    Args:
        directories: the user's, searched first, in this order; this package's comes last.
        parts: (section, name) -> values, of the parts that plugins registered.
    """

    directories: tuple[Path, ...] = ()
    parts: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)

    @staticmethod
    def find(config_directories: Sequence[str]) -> ConfigFiles:
        """The folders given, then ``./conf`` of the working directory where it holds option files of our groups.

        Raises:
            Refusal: a folder that is not there.
        """
        given = [Path(folder).expanduser().absolute() for folder in config_directories]
        missing = [
            f"--config-dir {folder}: no such folder; give one with option files"
            for folder in given
            if not folder.is_dir()
        ]
        if missing:
            raise Refusal(missing)
        here = Path("conf").absolute()
        names = _own_groups()
        if (
            here.is_dir()
            and here.resolve() != PACKAGE.resolve()
            and any(list((here / name).glob("*.yaml")) for name in names)
        ):
            given.append(here)
        return ConfigFiles(tuple(dict.fromkeys(given)))

    def groups(self, parts: Mapping[str, Iterable[str]] | None = None) -> dict[str, list[str]]:
        """Every group and the names of its option files and registered parts, sorted."""
        found: dict[str, set[str]] = {name: set() for name in _own_groups()}
        for folder in (*self.directories, PACKAGE):
            for name, options in found.items():
                options.update(file.stem for file in (folder / name).glob("*.yaml"))
        for name, registered in (parts or {}).items():
            if name in found:
                found[name].update(registered)
        return {name: sorted(options) for name, options in found.items()}

    def option_file(self, group: str, name: str) -> Path | None:
        """The file that ``group=name`` picks."""
        for folder in (*self.directories, PACKAGE):
            file = folder / group / f"{name}.yaml"
            if file.is_file():
                return file
        return None

    # ------------------------------------------------------------ what must be known before the schema is
    def plugin_modules(self, overrides: Sequence[str]) -> list[str] | None:
        """Modules under ``plugins`` on the command line, else in the chosen experiment; None where neither has any."""
        given = _last_value(overrides, "plugins")
        if given is not None:
            return [name for name in re.split(r"[\s,]+", given.strip("[]'\"")) if name]
        experiment = self.experiment(overrides)
        return list(experiment.get("plugins") or []) or None

    def chosen_parts(self, overrides: Sequence[str], registry: Any) -> dict[str, dict[str, str]]:
        """Section -> the registered part that the command line, or the chosen experiment, picks for it."""
        chosen = {}
        for item in self.experiment(overrides).get("defaults") or []:
            if isinstance(item, Mapping):
                for key, name in item.items():
                    chosen[str(key).removeprefix("override ").strip().lstrip("/")] = name
        for section in SECTIONS:
            given = _last_value(overrides, section)
            if given is not None:
                chosen[section] = given
        return {section: {PLUGIN_KEY: name} for section, name in chosen.items() if name in registry.parts(section)}

    def experiment(self, overrides: Sequence[str]) -> Mapping[str, Any]:
        """The content of the experiment's file that the command line chooses; empty where it chooses none."""
        name = _last_value(overrides, "experiment")
        file = self.option_file("experiment", name) if name else None
        content = _load_yaml(file) if file else {}
        return content if isinstance(content, Mapping) else {}

    # ------------------------------------------------------------ Hydra
    def compose(
        self, base: Mapping[str, Any], chosen: Mapping[str, str | None], overrides: Sequence[str], groups: bool = True
    ) -> dict[str, Any]:
        """Base values, then option files, then overrides, as plain dictionaries with everything resolved.

        Args:
            base: values of every option.
            chosen: group -> option file or registered part, in place of config.yaml's.
            overrides: of values, in Hydra's grammar, known to be right.
            groups: whether config.yaml's option files apply at all.

        Raises:
            Refusal: files that Hydra cannot read or combine.
        """
        from hydra import compose, initialize_config_dir, initialize_config_module
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        arguments = [f"{group}={'null' if name is None else name}" for group, name in chosen.items()] + list(overrides)
        arguments += self.search_path_override()
        first = str(self.directories[0]) if self.directories else None
        opened = (
            initialize_config_dir(first, version_base="1.3")
            if first
            else initialize_config_module("gridtron.conf", version_base="1.3")
        )
        try:
            with opened, self.registered(base, groups) as primary:
                composed = compose(primary, arguments, return_hydra_config=True)
                picked = OmegaConf.to_container(composed.hydra.runtime.choices)
                own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
                values = OmegaConf.to_container(own, resolve=True)
        except (HydraException, OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as fault:
            raise Refusal([_composition_message(fault)]) from fault
        assert isinstance(values, dict) and isinstance(picked, dict)
        result = {str(key): value for key, value in values.items()}
        ours = _own_groups()
        result[CHOICES_KEY] = {str(group): name for group, name in picked.items() if group in ours and name is not None}
        return result

    @contextmanager
    def registered(self, base: Mapping[str, Any], groups: bool = True) -> Iterator[str]:
        """Gives Hydra the primary configuration and the registered parts, for a while; yields the primary one's name.

        The primary one is not read from the search path: a config.yaml of the user's own project must not replace it.
        """
        from hydra.core.config_store import ConfigStore

        primary = _load_yaml(PACKAGE / "config.yaml")
        assert isinstance(primary, dict)
        if not groups:
            primary = {key: value for key, value in primary.items() if key != "defaults"}
        store = ConfigStore.instance()
        store.store(name=_PRIMARY, node={**primary, **base})
        for (section, name), values in self.parts.items():
            store.store(group=section, name=name, node=dict(values))
        try:
            yield _PRIMARY
        finally:
            # Ours alone: Hydra's own plugins register theirs here too, once.
            del store.repo[f"{_PRIMARY}.yaml"]
            for section, name in self.parts:
                del store.repo[section][f"{name}.yaml"]

    def search_path_override(self) -> list[str]:
        """Hydra's own override that adds the folders after the first, and this package's."""
        if not self.directories:
            return []
        from gridtron.conf.overrides import quote_text

        paths = [quote_text(f"file://{folder}") for folder in self.directories[1:]] + ["'pkg://gridtron.conf'"]
        return [f"hydra.searchpath=[{','.join(paths)}]"]

    def with_place(self, fault: Violation, choices: Mapping[str, str]) -> Violation:
        """A violation with the option file in which its key stands, where one of those chosen has it."""
        for group, name in choices.items():
            file = self.option_file(group, name)
            if file is None:
                continue
            content = _load_yaml(file)
            nested = content if group == "experiment" else {group: content}
            if any(_holds(nested, key.split(".")) for key in fault.keys):
                return Violation(f"{fault.message} (in {group}/{file.name})", fault.keys)
        return fault


def _own_groups() -> list[str]:
    return sorted(entry.name for entry in PACKAGE.iterdir() if entry.is_dir() and list(entry.glob("*.yaml")))


def _last_value(overrides: Sequence[str], key: str) -> str | None:
    found = [written.partition("=")[2] for written in overrides if written.partition("=")[0].lstrip("+") == key]
    return found[-1] if found else None


def _load_yaml(file: Path) -> Any:
    """The plain content of a YAML file; an empty dictionary where it cannot be read (Hydra then tells why)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=False) or {}
    except (OmegaConfBaseException, YAMLError, OSError, ValueError):
        return {}


def _holds(content: Any, path: list[str]) -> bool:
    for name in path:
        if not isinstance(content, Mapping) or name not in content:
            return False
        content = content[name]
    return True


def _composition_message(fault: BaseException) -> str:
    """The first lines of what Hydra or YAML says, and of its cause where that says more."""
    if isinstance(fault, UnicodeDecodeError):
        return (
            f"an option file is not UTF-8 text (byte {fault.start} of it: {fault.reason}); look at the files that were "
            "chosen, in --config-dir and in ./conf"
        )
    texts = [str(item).strip() for item in (fault, fault.__cause__) if item is not None and str(item).strip()]
    lines = [re.sub(r"\s+", " ", line).strip() for text in texts for line in text.splitlines() if line.strip()]
    return "option files cannot be combined: " + "; ".join(dict.fromkeys(lines[:4]))[:400]
