"""Between a Hugging Face config.json and GPTConfig, both ways by the table of families.

What this project's decoder computes exactly is carried; anything else is refused by name, a key that is not known too:
whether it changes the model cannot be told.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gridtron.models.config import GPTConfig
from gridtron.models.huggingface.families import FAMILIES, NEVER_MATTER, REQUIRED, Family, Setting
from gridtron.models.huggingface.folder import CONFIG, read_json
from gridtron.models.huggingface.rotary_settings import read_rotary, write_rotary

_FLAGS = ("tie_embeddings", "parallel_residual")
_NUMBERS = ("norm_eps", "attention_dropout", "init_std")
_SHOWN = 10
_LARGEST = 1 << 31

TRAINING_ONLY = ("dropout", "attention_dropout", "init_std")
"""Options that say nothing about what trained weights compute."""


@dataclass(frozen=True)
class Translation:
    """A config.json as this project understands it.

    Args:
        family: whose names and layouts its weights have.
        config: its shape.
        notes: what a person should know about it.
        window: the longest sequence for which attention over the whole of it is what the model does; None: any.
    """

    family: Family
    config: GPTConfig
    notes: tuple[str, ...] = ()
    window: int | None = None


def config_from_huggingface(settings: Mapping[str, Any]) -> GPTConfig:
    """The shape that a Hugging Face config.json describes.

    Args:
        settings: its content.

    Raises:
        ValueError: a family that is not known, and every setting under which the model would compute something else.
    """
    return translate(settings).config


def read_translation(path: str | Path) -> Translation:
    """The config.json of a folder, understood.

    Raises:
        ValueError: see :func:`gridtron.models.huggingface.config_from_huggingface`, with the file's name.
    """
    file = Path(path).expanduser() / CONFIG
    try:
        return translate(read_json(file))
    except ValueError as fault:
        text = str(fault)
        raise ValueError(text if text.startswith(str(file)) else f"{file}: {text}") from None


def read_config(path: str | Path) -> GPTConfig:
    """The shape of the model in a Hugging Face folder.

    Raises:
        ValueError: a model that this project does not compute, with every reason.
    """
    return read_translation(path).config


def translate(settings: Mapping[str, Any]) -> Translation:
    """:func:`config_from_huggingface`, with the family and with notes."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        close = difflib.get_close_matches(str(kind), FAMILIES, 1, 0.6)
        hint = f"nearest: {close[0]}; " if close else ""
        raise ValueError(f"model_type={kind!r} is not known; {hint}known: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    faults = [*_unknown(settings, family), *_only(settings, family)]
    options: dict[str, Any] = dict(family.fixed)
    for setting in family.settings:
        value, fault = _read(setting, settings)
        if fault is None:
            options[setting.ours] = value
        else:
            faults.append(fault)
    for found, wrong in (_activation(settings, family), _dropout(settings, family), _biases(settings, family)):
        options |= found
        faults += wrong
    if family.rotary is not None:
        found, wrong = read_rotary(settings, family)
        options |= found
        faults += wrong
    if faults:
        raise ValueError(_listed(f"this {kind} is not one that can be computed here:", faults))
    window = _window(settings, family)
    notes = []
    if window is not None and window < options["max_position_embeddings"]:
        longest = options["max_position_embeddings"]
        notes.append(
            f"sliding_window={window}: attention over the whole sequence is the same up to that length, so that "
            f"max_position_embeddings is {window} here and {longest} there"
        )
        options["max_position_embeddings"] = window
    config = GPTConfig(**options)
    if violations := config.violations():
        raise ValueError(_listed(f"this {kind} is not one that can be computed here:", violations))
    return Translation(family, config, tuple(notes), window)


def _unknown(settings: Mapping[str, Any], family: Family) -> list[str]:
    known = [*family.keys()]
    found = []
    for key in settings:
        if key in NEVER_MATTER or key in known or settings[key] is None:
            continue
        if key == "is_encoder_decoder" and settings[key] is False:
            continue
        if key == "quantization_config":
            found.append("quantization_config: quantised weights are not read; save the model in bf16 or fp32 first")
            continue
        near = difflib.get_close_matches(key, known, 1, 0.8)
        hint = f"nearest: {near[0]}" if near else "delete it from config.json if it does not change what is computed"
        found.append(f"{_show(key)}={_show(settings[key])}: not known of {family.name}; {hint}")
    return found


def _only(settings: Mapping[str, Any], family: Family) -> list[str]:
    return [
        f"{key}={_show(settings[key])}: not computed here; possible: {' or '.join(_show(v) for v in allowed)}"
        for key, allowed in family.only.items()
        if key in settings and settings[key] not in allowed
    ]


def _read(setting: Setting, settings: Mapping[str, Any]) -> tuple[Any, str | None]:
    """One option, or what is wrong with the key."""
    value = settings.get(setting.theirs, setting.default)
    if value is REQUIRED:
        return None, f"{setting.theirs} is missing"
    if setting.ours in _FLAGS:
        fits, wanted = isinstance(value, bool), "true or false"
    elif setting.ours in _NUMBERS:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if number and setting.ours == "attention_dropout":
            fits, wanted = 0 <= value < 1, "a number from 0 and below 1"
        else:
            fits, wanted = number and (value > 0 or (setting.ours == "init_std" and value == 0)), "a number above 0"
        value = float(value) if fits else value
    else:
        fits, wanted = type(value) is int and 1 <= value < _LARGEST, "a whole number from 1"
        if value is None and setting.default is not REQUIRED:
            return None, None
    shown = ascii(value)[:60] if isinstance(value, str) else _show(value)
    return (value, None) if fits else (None, f"{setting.theirs}={shown}: should be {wanted}")


def _activation(settings: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    name = settings.get(family.activation_key, next(iter(family.activations)))
    if isinstance(name, str) and name in family.activations:
        return {"activation": family.activations[name]}, []
    known = ", ".join(family.activations)
    return {}, [f"{family.activation_key}={_show(name)}: not computed here; possible: {known}"]


def _dropout(settings: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    if not family.dropout:
        return {}, []
    default = 0.1 if family.name == "gpt2" else 0.0
    values = {key: settings.get(key, default) for key in family.dropout}
    shown = ", ".join(f"{key}={_show(value)}" for key, value in values.items())
    if any(type(value) not in (int, float) or not 0 <= value < 1 for value in values.values()):
        return {}, [f"{shown}: should be numbers from 0 and below 1"]
    if len(set(values.values())) > 1:
        return {}, [f"{shown}: one dropout serves the embedding and the branches here; make them equal in config.json"]
    return {"dropout": float(next(iter(values.values())))}, []


def _biases(settings: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    if family.biases is None:
        return {}, []
    values = {key: settings.get(key, False) for key in family.biases}
    faults = [
        f"{key}={_show(value)}: should be true or false" for key, value in values.items() if type(value) is not bool
    ]
    attention, mlp = values.values()
    return {"bias": attention, "qkv_bias": None, "mlp_bias": None if mlp == attention else mlp}, faults


def _window(settings: Mapping[str, Any], family: Family) -> int | None:
    """The sliding window of attention; None where every layer sees the whole sequence."""
    if family.windows is None:
        return None
    default = 4096 if family.windows == "always" else None
    window = settings.get("sliding_window", default)
    if family.windows == "by layer":
        kinds = settings.get("layer_types")
        if isinstance(kinds, list):
            used = "sliding_attention" in kinds
        else:
            used = bool(settings.get("use_sliding_window", False)) and (
                settings.get("max_window_layers", 28) < settings["num_hidden_layers"]
            )
            window = settings.get("sliding_window", 4096)
        window = window if used else None
    return window if type(window) is int and window > 0 else None


# -------------------------------------------------------------------- the other way
def config_to_huggingface(config: GPTConfig, family: str | None = None) -> dict[str, Any]:
    """The content of a config.json for a shape; dropouts that the family has no key for are left out.

    Args:
        config: the shape, with vocab_size.
        family: its model_type; default: the first of FAMILIES that has this shape.

    Raises:
        ValueError: no family, or not this one, computes what the shape does, with what differs.
    """
    if family is not None and family not in FAMILIES:
        close = difflib.get_close_matches(family, FAMILIES, 1, 0)
        raise ValueError(f"family={family} is not known; nearest: {close[0]}; known: {', '.join(FAMILIES)}")
    if config.vocab_size is None or config.build is not None:
        lacks = "no vocab_size" if config.vocab_size is None else f"a model of its own, build={config.build}"
        raise ValueError(f"this model has {lacks}: it cannot be written for transformers")
    tried = {}
    for candidate in FAMILIES.values() if family is None else [FAMILIES[family]]:
        written = _written(config, candidate)
        tried[candidate.name] = _differences(config, written, candidate)
        if not tried[candidate.name]:
            return written
    nearest = min(tried, key=lambda name: len(tried[name]))
    heading = f"the family {nearest} does not compute this shape:" if family else (
        f"no family that is known computes this shape ({', '.join(FAMILIES)}); nearest, {nearest}, has:"
    )  # fmt: skip
    raise ValueError(_listed(heading, tried[nearest]))


def _written(config: GPTConfig, family: Family) -> dict[str, Any]:
    options = asdict(config.resolved())
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.name}
    # Else transformers would take the family's own: ids that mean something else in another vocabulary.
    written |= {"bos_token_id": None, "eos_token_id": None}
    written |= {setting.theirs: options[setting.ours] for setting in family.settings}
    named = (name for name, ours in family.activations.items() if ours == config.activation)
    written[family.activation_key] = next(named, next(iter(family.activations)))
    written |= dict.fromkeys(family.dropout, config.dropout)
    if family.biases is not None:
        written |= dict(zip(family.biases, (config.bias, config.feed_forward_bias), strict=True))
    if family.rotary is not None:
        written |= write_rotary(options, family)
    if family.windows is not None:
        written |= {"sliding_window": None}
    if family.windows == "by layer":
        written["use_sliding_window"] = False
    return written


def _differences(config: GPTConfig, written: Mapping[str, Any], family: Family) -> list[str]:
    """What reading a written config.json back would change."""
    if family.whole_heads and config.hidden_size % config.num_attention_heads:
        return [
            f"hidden_size={config.hidden_size}, a multiple of num_attention_heads={config.num_attention_heads} there"
        ]
    try:
        read = config_from_huggingface(written)
    except ValueError as fault:
        return str(fault).splitlines()[1:] or [str(fault)]
    before, after = (asdict(c.resolved()) | dict.fromkeys(TRAINING_ONLY) for c in (config, read))
    return [f"{key}={_show(after[key])}, and this model {_show(before[key])}" for key in before if
            before[key] != after[key]]  # fmt: skip


def _show(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.isprintable() else ascii(text)


def _listed(heading: str, faults: list[str]) -> str:
    more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
    return "\n  ".join([heading, *faults[:_SHOWN], *more])
