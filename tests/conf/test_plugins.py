"""A user's own parts: registered, chosen, configured, refused with what to change."""

import sys
from dataclasses import dataclass

import pytest

from gridtron.conf.compose import Refusal, compose
from gridtron.conf.plugins import Registry, load_builder, load_plugins, signature_fault
from gridtron.conf.rules import Surroundings
from gridtron.conf.schema import plan_from_dict, plan_to_dict

AROUND = Surroundings(cores=8, data_fault=lambda config: None, folder_fault=lambda folder: None)

MODULE = """
from dataclasses import dataclass
from gridtron.core.options import option

@dataclass(frozen=True)
class Mine:
    width: int = option(32, "width", minimum=1)
    vocab_size: int | None = option(None, "ids")

@dataclass(frozen=True)
class Bell:
    every: int = option(10, "steps", minimum=1)

@dataclass(frozen=True)
class Slow:
    lr: float = option(0.1, "rate", minimum=0)

def build(config, grid):
    return (config.width, grid)

def register(registry):
    registry.add("model", "mine", Mine, build)
    registry.add("callback", "bell", Bell, build)
    registry.add("optimizer", "slow", Slow, build)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A working directory with a module of a name of its own, which is importable from there alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"plugin_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    yield name
    for key in [key for key in sys.modules if key.startswith("plugin_")]:
        del sys.modules[key]


def plan_of(*overrides, **more):
    return compose(overrides, surroundings=AROUND, **more)


def fault_of(*overrides):
    with pytest.raises(Refusal) as caught:
        plan_of(*overrides)
    (line,) = caught.value.violations
    return line


def test_chosen_and_configured(module):
    plan = plan_of(f"plugins=[{module}]", "model=mine", "model.width=64", "optimizer=slow", "callbacks.bell.every=3")
    assert (type(plan.model).__name__, plan.model.width, plan.model.vocab_size) == ("Mine", 64, 256)
    assert plan.parts == {"model": "mine", "optimizer": "slow"} and plan.callbacks["bell"].every == 3
    assert load_plugins(plan.plugins).builder("model", plan.parts["model"])(plan.model, "grid") == (64, "grid")


def test_callbacks_run_by_default_and_can_be_left_out(module):
    assert plan_of(f"plugins=[{module}]").callbacks["bell"].every == 10
    assert plan_of(f"plugins=[{module}]", "~callbacks.bell").callbacks == {}
    assert "nearest: bell" in fault_of(f"plugins=[{module}]", "~callbacks.bel")


def test_options_of_parts_are_checked(module):
    assert "nearest: model.width" in fault_of(f"plugins=[{module}]", "model=mine", "model.widht=3")
    assert fault_of(f"plugins=[{module}]", "model=mine", "model.width=0") == "model.width=0: must be at least 1"
    assert "there is no option model.hidden_size" in fault_of(
        f"plugins=[{module}]", "model=mine", "model.hidden_size=3"
    )
    assert "nearest: callbacks.bell.every" in fault_of(f"plugins=[{module}]", "callbacks.bell.evry=3")


def test_a_plan_with_parts_survives(module):
    plan = plan_of(f"plugins=[{module}]", "model=mine", "model.width=64", "callbacks.bell.every=3")
    values = plan_to_dict(plan)
    assert plan_from_dict(values) == plan
    assert plan_of(stored=values) == plan
    assert plan_of("model.width=8", stored=values).model.width == 8
    del values["plugins"]
    with pytest.raises(Refusal, match=r"no module under plugins= registers a model of that name"):
        plan_from_dict(values)


def test_an_experiment_may_name_plugins(module, tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = f"# @package _global_\ndefaults:\n  - override /model: mine\nplugins: [{module}]\nmodel: {{width: 5}}\n"
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(text)
    plan = plan_of("experiment=own")
    assert plan.model.width == 5 and plan.plugins == (module,)
    assert plan_of("experiment=own", "model.width=6").model.width == 6


def test_parts_of_one_request_are_not_there_in_the_next(module):
    plan_of(f"plugins=[{module}]", "model=mine")
    assert "no such file in model/" in fault_of("model=mine")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no module"),
        ("import nothing_of_that_name\n", "no module 'nothing_of_that_name'"),
        ("1 / 0\n", "importing it fails with ZeroDivisionError"),
        ("x = 1\n", "it has no function register(registry)"),
        ("def register(registry):\n    registry.add('modle', 'a', int, print)\n", "nearest: model"),
        ("def register(registry):\n    registry.add('model', 'a', int, print)\n", "is not a dataclass"),
        ("def register(registry):\n    1 / 0\n", "its register(registry) fails with ZeroDivisionError"),
        ("def register():\n    pass\n", "its register(registry) fails with TypeError"),
    ],
)
def test_modules_that_cannot_serve(module, tmp_path, text, words):
    if text is None:
        module = "plugin_that_is_not_there"
    else:
        (tmp_path / f"{module}.py").write_text(text)
    assert words in fault_of(f"plugins=[{module}]")


@dataclass(frozen=True)
class Fine:
    size: int = 1


@dataclass(frozen=True)
class NeedsValue:
    size: int


@dataclass(frozen=True)
class WrongDefault:
    size: int = "a"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "name", "schema", "build", "words"),
    [
        ("model", "a b", Fine, lambda config, grid: 0, "letters, digits and _"),
        ("model", "a", NeedsValue, lambda config, grid: 0, "needs a default for each field"),
        (
            "model",
            "a",
            WrongDefault,
            lambda config, grid: 0,
            "the default WrongDefault.size=a does not fit",
        ),
        ("model", "a", Fine, lambda config: 0, "cannot be called as (config, grid)"),
        ("model", "a", Fine, lambda config, grid, third: 0, "cannot be called as (config, grid)"),
        ("model", "a", Fine, 3, "is not callable"),
        ("optimizer", "a", Fine, lambda config, grid: 0, "has no field lr"),
        ("loss", "a", Fine, lambda config, grid: 0, "there are model, data"),
    ],
)
def test_what_cannot_be_registered(kind, name, schema, build, words):
    with pytest.raises(ValueError) as caught:
        Registry().add(kind, name, schema, build)
    assert words in str(caught.value)


def test_a_name_is_taken_once():
    registry = Registry()
    registry.add("model", "a", Fine, lambda config, grid: 0)
    with pytest.raises(ValueError, match="registered twice"):
        registry.add("model", "a", Fine, lambda config, grid: 0)


@pytest.mark.parametrize("build", [lambda config, grid: 0, lambda *arguments: 0, lambda config, grid, more=1: 0])
def test_signatures_that_serve(build):
    assert signature_fault(build) is None


def test_builder_named_directly(module):
    plan = plan_of(f"model.build={module}:build", "model.hidden_size=65")  # the shape's own rules are not ours then
    assert load_builder(plan.model.build)(plan_of(f"plugins=[{module}]", "model=mine").model, "grid") == (32, "grid")
    assert "has no bild; nearest: build" in fault_of(f"model.build={module}:bild")
    assert "no module 'plugin_none'" in fault_of("model.build=plugin_none:build")
    assert "cannot be called as (config, grid)" in fault_of(f"model.build={module}:register")


def test_entry_points_are_loaded(monkeypatch, tmp_path):
    """An installed distribution with an entry point, as a folder of metadata on the path."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gridtron.plugins]\ntheirs = plugin_theirs\n")
    (tmp_path / "plugin_theirs.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert set(load_plugins([]).parts("model")) == {"mine"}
    assert set(load_plugins([], entry_points=False).parts("model")) == set()
    sys.modules.pop("plugin_theirs")
