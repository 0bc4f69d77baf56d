"""Where a run's first weights come from (``checkpoint.init_from``), and the model that follows from it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.conf.refusal import Refusal
from gridtron.conf.schema import CHOICES_KEY, PLUGIN_KEY, Plan, plan_from_dict, plan_to_dict
from gridtron.conf.values import Violation, show
from gridtron.core.errors import JobError
from gridtron.models.config import GPTConfig

if TYPE_CHECKING:
    from gridtron.core.checkpoint.manifest import Manifest
    from gridtron.parallel.weights import WeightSource

_LONGEST_KEY = 100
_SHOWN = 6
"""Tensors named in a message before the rest is counted."""

_FREE = ("dropout", "attention_dropout", "init_std", "rope_theta", "rope_scaling")
"""Options of the model that may differ from the source's: its tensors are the same, and what stretches a context is."""


@dataclass(frozen=True)
class Source:
    """Weights to begin with.

    Args:
        path: the folder: Hugging Face's, or of one checkpoint.
        kind: for people: a family of Hugging Face's, or "checkpoint".
        config: the shape; None: of a model of its user's own.
        notes: what a person should know.
        window: the longest sequence for which this decoder is theirs; None: any.
    """

    path: Path
    kind: str
    config: GPTConfig | None
    notes: tuple[str, ...] = ()
    window: int | None = None

    def weights(self) -> WeightSource:
        """What ranks read from.

        Raises:
            ValueError, JobError: what is wrong with it.
        """
        if self.kind != "checkpoint":
            from gridtron.models.huggingface.reading import HuggingFaceWeights

            return HuggingFaceWeights(self.path)
        from gridtron.core.checkpoint.stored import Stored
        from gridtron.core.checkpoint.weights import CheckpointWeights

        return CheckpointWeights(Stored(self.path))


def find_source(text: str) -> Source:
    """What ``checkpoint.init_from`` names.

    Raises:
        ValueError, JobError: nothing of the kind lies there, or a model that is not computed here.
    """
    from gridtron.models.huggingface.folder import is_huggingface
    from gridtron.models.huggingface.settings import read_translation

    path = Path(text).expanduser().absolute()
    if is_huggingface(path):
        translation = read_translation(path)
        return Source(path, translation.family.name, translation.config, translation.notes, translation.window)
    from gridtron.core.checkpoint.find import look_for
    from gridtron.core.checkpoint.layout import CheckpointError
    from gridtron.core.checkpoint.manifest import Manifest

    try:
        found = look_for(path)
    except CheckpointError as fault:
        what = "no such folder" if not path.is_dir() else f"neither Hugging Face's (no config.json), nor: {fault}"
        raise ValueError(f"{path}: {what}") from None
    assert found.path is not None
    skipped = tuple(f"skipped {reason}" for reason in found.skipped)
    return Source(found.path, "checkpoint", stored_config(Manifest.read(found.path), found.path), skipped)


def stored_config(manifest: Manifest, path: Path) -> GPTConfig | None:
    """The shape of the model in a checkpoint; None: of a model of its user's own.

    Raises:
        ValueError: it does not say.
    """
    plan = manifest.extra.get("plan")
    model: Any = plan.get("model") if isinstance(plan, Mapping) else None
    if not isinstance(model, Mapping):
        raise ValueError(f"{path} does not say which model it holds: it was not saved by a run or by gridtron convert")
    if PLUGIN_KEY in model or model.get("build"):
        return None
    if longest := next((key for key in model if len(key) > _LONGEST_KEY), None):
        raise ValueError(f"{path}: its model cannot be read: there is no option {longest[:_LONGEST_KEY]}...")
    try:
        config = plan_from_dict({"model": model}).model
    except Refusal as refusal:
        raise ValueError(f"{path}: its model cannot be read: {str(refusal)[:300]}") from None
    _check_size(config, manifest, path)
    return config


def _check_size(config: GPTConfig, manifest: Manifest, path: Path) -> None:
    """The model is no larger than the tensors beside it: else names, or memory, would be made on the file's word."""
    held = [math.prod(entry.shape) for name, entry in manifest.tensors.items() if name.startswith("parameters/")]
    heads = max(config.num_attention_heads, config.kv_heads) * config.head_size
    positions = config.max_position_embeddings if config.position == "learned" else 0
    widest = max(config.vocab_size or 0, heads, config.ffn_size, positions)
    if config.num_layers > len(held) or widest * config.hidden_size > sum(held):
        raise ValueError(
            f"{path} says that its model has {config.num_layers} layers and a matrix of {widest} x "
            f"{config.hidden_size}, and holds {len(held)} parameters of {sum(held)} numbers; use another checkpoint"
        )


def take_model(values: dict[str, Any], given: Collection[str], chosen: bool) -> list[Violation]:
    """Puts the source's model into the composed ``values`` of a run that begins, but for what was asked for by hand.

    Args:
        values: nested dictionaries of every option; ``model`` is changed in place.
        given: options of the model that were set by hand.
        chosen: a file of the model's options was picked by hand: then all of them were.

    Returns:
        What is wrong with the source.
    """
    checkpoint, model = values.get("checkpoint"), values.get("model")
    named = checkpoint.get("init_from") if isinstance(checkpoint, dict) else None
    if not isinstance(named, str) or not isinstance(checkpoint, dict):
        return []
    path = str(Path(named).expanduser().absolute())
    checkpoint["init_from"] = path
    if not isinstance(model, dict) or PLUGIN_KEY in model or model.get("build") or chosen:
        return []
    try:
        source = find_source(path)
    except (ValueError, JobError) as fault:
        return [Violation(f"checkpoint.init_from={fault}", {"checkpoint.init_from", "model"})]
    if source.config is not None:
        taken = plan_to_dict(Plan(model=source.config))["model"]
        values["model"] = taken | {name: model[name] for name in given if name in model}
        values.get(CHOICES_KEY, {}).pop("model", None)
    return []


def source_violations(plan: Plan) -> list[Violation]:
    """Why the weights that ``checkpoint.init_from`` names cannot be those of the plan's model."""
    if plan.checkpoint.init_from is None:
        return []
    keys = {"checkpoint.init_from"}
    try:
        source = find_source(plan.checkpoint.init_from)
        weights = source.weights()
    except (ValueError, JobError) as fault:
        return [Violation(f"checkpoint.init_from={fault}", keys)]
    own = isinstance(plan.model, GPTConfig) and plan.model.build is None
    if own and source.config is not None:
        if found := _differences(plan.model, source):
            return found
        if faults := tensor_faults(weights.shapes, source.config):
            text = f"{source.path}: not the weights of its model: {', '.join(faults)}"
            return [Violation(f"checkpoint.init_from={text}", keys)]
        return []
    if own or source.kind != "checkpoint":
        what = "a model of its user's own" if own else f"a {source.kind}"
        mine = "this project's" if own else "your own"
        return [Violation(f"checkpoint.init_from={source.path}: it holds {what}, and this run's model is {mine}", keys)]
    return []


def _differences(config: GPTConfig, source: Source) -> list[Violation]:
    assert source.config is not None
    asked, there = asdict(config.resolved()), asdict(source.config.resolved())
    free = {*_FREE, "build"}
    scaling = there["rope_scaling"] or {}
    if there["position"] == "rotary" and scaling.get("rope_type") != "dynamic":
        free.add("max_position_embeddings")
    if source.window is not None and config.max_position_embeddings > source.window:
        return [
            Violation(
                f"model.max_position_embeddings={config.max_position_embeddings}: attention in the weights of "
                f"checkpoint.init_from={source.path} sees a window of {source.window}, and longer sequences would make "
                f"another model of them; nearest: {source.window}",
                {"checkpoint.init_from", "model.max_position_embeddings"},
            )
        ]
    names = [name for name in asked if name not in free and asked[name] != there[name]]
    # What follows from others is not what was asked for.
    names = [name for name in names if getattr(config, name) is not None] or names
    if not names:
        return []
    listed = ", ".join(f"model.{name}={show(asked[name])} ({show(there[name])} there)" for name in names)
    return [
        Violation(
            f"{listed}: the weights of checkpoint.init_from={source.path} make no other model than theirs; leave "
            f"{'the option' if len(names) == 1 else 'the options'} out",
            {"checkpoint.init_from", *(f"model.{name}" for name in names)},
        )
    ]


def tensor_faults(found: Mapping[str, tuple[int, ...]], config: GPTConfig) -> list[str]:
    """How the shapes of weights by name are not those of a model; the first few, and how many more there are."""
    from gridtron.models.huggingface.reading import parameter_shapes

    expected = parameter_shapes(config)
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"unexpected {name}" for name in found if name not in expected]
    faults += [
        f"{name} of shape {list(found[name])} and not {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    return faults[:_SHOWN] + ([f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else [])


def stretched(plan: Plan, source: Source) -> list[str]:
    """Notes on options of the rotary positions that are not the source's."""
    if source.config is None or not isinstance(plan.model, GPTConfig):
        return []
    asked, there = plan.model.resolved(), source.config.resolved()
    return [
        f"model.{name}={show(getattr(asked, name))}, and {show(getattr(there, name))} where the weights come from"
        for name in ("rope_theta", "rope_scaling")
        if getattr(asked, name) != getattr(there, name)
    ]
