"""Settings of rotary positions: as config.json of transformers 5 has them, as older ones had, and as ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gridtron.models.huggingface.families import Family

_TRAINED = "original_max_position_embeddings"
_WITH_TRAINED = ("llama3", "yarn")
"""Kinds that ask for the length before scaling; max_position_embeddings where it is not told."""


def read_rotary(settings: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """rope_theta, rope_scaling and rotary_fraction of a config.json, and what is wrong with them.

    transformers 5 writes ``rope_parameters``, which hold the base too; older ones ``rope_theta`` (GPT-NeoX:
    ``rotary_emb_base``, ``rotary_pct``) and ``rope_scaling``, whose kind is ``rope_type`` or ``type``.
    """
    assert family.rotary is not None
    base_key, fraction_key, whole = family.rotary
    for key in ("rope_scaling", "rope_parameters"):
        if settings.get(key) is not None and not isinstance(settings[key], Mapping):
            return {}, [f"{key}={settings[key]!r:.60}: should be an object, or null"]
    found = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    scaling = {key: value for key, value in found.items() if value is not None}
    theta = scaling.pop("rope_theta", settings.get(base_key) or 10000.0)
    named = settings.get(fraction_key) if fraction_key else None
    fraction = scaling.pop("partial_rotary_factor", whole if named is None else named)
    faults = [
        f"{key}={value!r}: should be a number"
        for key, value in ((base_key, theta), (fraction_key or "partial_rotary_factor", fraction))
        if not _is_number(value)
    ]
    if not faults and not (theta > 0 and 0 < fraction <= 1):
        faults.append(f"{base_key}={theta}, rotary part of a head {fraction}: should be above 0, the part at most 1")
    if not faults and fraction_key is None and fraction != 1:
        faults.append(f"partial_rotary_factor={fraction}: a {family.name} of this kind is not known; only 1 is")
    first, second = scaling.pop("rope_type", None), scaling.pop("type", None)
    kind = first or second or "default"
    if kind == "default":
        faults += [f"rope_scaling.{key}={value!r} without a rope_type; leave it out, or name the kind" for key, value
                   in scaling.items() if key != _TRAINED]  # fmt: skip
        read: dict[str, Any] | None = None
    else:
        read = {"rope_type": kind, **_completed(kind, scaling, settings)}
    return {"rope_theta": theta, "rope_scaling": read, "rotary_fraction": fraction}, faults


def _completed(kind: str, scaling: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """With what transformers takes where nothing is told, so that it does not depend on max_position_embeddings."""
    longest = settings.get("max_position_embeddings")
    if kind in _WITH_TRAINED:
        outside = settings.get(_TRAINED)
        trained = scaling.get(_TRAINED, longest) if outside is None else outside
        scaling = {**scaling, _TRAINED: trained}
        if kind == "yarn" and "factor" not in scaling and _is_number(longest) and _is_number(trained) and trained:
            scaling["factor"] = longest / trained
    if kind == "yarn":
        # DeepSeek's two factors have the effect of one.
        pair = scaling.pop("mscale", None), scaling.pop("mscale_all_dim", None)
        factor = scaling.get("factor")
        if "attention_factor" not in scaling and all(_is_number(value) and value for value in (*pair, factor)):
            above, under = (_magnitude(factor, value) for value in pair)
            scaling["attention_factor"] = above / under
    return scaling


def _magnitude(factor: Any, scale: Any) -> float:
    """Peng et al. 2023 (arXiv:2309.00071), equation 22, with a scale on its logarithm."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rotary(options: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The keys of a config.json, as transformers before 5 had them: later ones read these as well."""
    assert family.rotary is not None
    base_key, fraction_key, _ = family.rotary
    scaling = options["rope_scaling"]
    written: dict[str, Any] = {base_key: options["rope_theta"], "rope_scaling": dict(scaling) if scaling else None}
    if fraction_key is not None:
        written[fraction_key] = options["rotary_fraction"]
    return written


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
