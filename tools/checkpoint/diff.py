"""``gridtron checkpoint diff``: where two checkpoints differ, tensor by tensor, whatever grids they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gridtron.conf.refusal import Refusal
from gridtron.core.checkpoint.manifest import DTYPES
from gridtron.core.options import option
from gridtron.tools.checkpoint.opening import (
    check_report,
    console,
    kind_of,
    open_checkpoint,
    printable,
    progress_of,
    write_report,
)

if TYPE_CHECKING:
    from torch import Tensor

    from gridtron.core.checkpoint.stored import Stored

_SMALL = 1e-3
"""An entry so much smaller than the largest of its kind is measured as if it were of this size (DESIGN, rule 1)."""
_CHUNK = 1 << 16
"""Elements that are compared at once, in float64."""
_SHOWN = 20


@dataclass(frozen=True)
class DiffOptions:
    path: str | None = option(None, "a checkpoint, its run's folder or its checkpoints folder", path=True)
    other: str | None = option(None, "the one it is held against", path=True)
    tolerance: float = option(0.0, "relative errors up to this are no difference", minimum=0)
    out: str | None = option(None, "JSON file for every difference", path=True)


@dataclass(frozen=True)
class Difference:
    """Two tensors of one name and one shape.

    Args:
        name: of both.
        largest: max |a - b|, over what is a number in both.
        relative: largest / max(max |b|, 1e-3 s), s the largest entry of all tensors of this kind in b.
        differing: elements that are not equal; a NaN in both is equal.
        elements: of each.
        nans: of a, of b.
        lost: elements that are NaN in one alone.
    """

    name: str
    largest: float
    relative: float
    differing: int
    elements: int
    nans: tuple[int, int]
    lost: int

    def counts(self, tolerance: float) -> bool:
        """Whether it is a difference under a tolerance."""
        return self.lost > 0 or (self.differing > 0 and not self.relative <= tolerance)


def run(options: DiffOptions) -> int:
    """0 where the two are the same; 1 where they differ."""
    one = open_checkpoint(options.path).stored
    other = open_checkpoint(options.other, "other").stored
    for stored in (one, other):
        check_report(options.out, stored)
    told, differences = compare(one, other)
    differing = [found for found in differences if found.counts(options.tolerance)]
    report = {
        "path": str(one.path),
        "other": str(other.path),
        "tolerance": options.tolerance,
        "same": not told and not differing,
        "told": told,
        "compared": len(differences),
        "differences": [asdict(found) for found in differing],
    }
    # JSON has no infinity: as text it is read everywhere.
    write_report(options.out, _finite(report))
    _show(report, differing)
    return 0 if report["same"] else 1


def compare(one: Stored, other: Stored) -> tuple[list[str], list[Difference]]:
    """What cannot be compared or is no tensor, as lines; and every tensor of both with its difference, largest first.

    In memory: one tensor of each checkpoint, and a small part of it in float64.

    Raises:
        CheckpointError: a damaged file.
        Refusal: they hold not a single tensor in common.
    """
    told = [
        f"{name}: {mine} there, {theirs} in the other"
        for name, mine, theirs in _counters(progress_of(one), progress_of(other))
    ]
    a, b = one.manifest.tensors, other.manifest.tensors
    told += [f"{name}: only in {one.path}" for name in a if name not in b]
    told += [f"{name}: only in {other.path}" for name in b if name not in a]
    common = [name for name in a if name in b]
    if (a or b) and not common:
        raise Refusal([f"{one.path} and {other.path} have no tensor's name in common: nothing to compare"])
    found: list[tuple[str, _Sums, float]] = []
    scales: dict[str, float] = {}
    for name in common:
        if a[name].shape != b[name].shape:
            told.append(f"{name}: shape {list(a[name].shape)}, {list(b[name].shape)} in the other")
            continue
        if a[name].dtype != b[name].dtype:
            told.append(f"{name}: {DTYPES[a[name].dtype][0]}, {DTYPES[b[name].dtype][0]} in the other")
        sums = _compare(one.tensor(name), other.tensor(name))
        found.append((name, sums, sums.scale))
        scales[kind_of(name)] = max(scales.get(kind_of(name), 0.0), sums.scale)
    differences = [_difference(name, sums, scales[kind_of(name)]) for name, sums, _ in found]
    return told, sorted(differences, key=lambda item: (-item.lost, -item.relative, item.name))


def _counters(mine: Mapping[str, int], theirs: Mapping[str, int]) -> list[tuple[str, Any, Any]]:
    names = dict.fromkeys([*mine, *theirs])
    return [(name, mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)]


@dataclass
class _Sums:
    """What is gathered over the chunks of two tensors."""

    largest: float = 0.0
    scale: float = 0.0
    differing: int = 0
    elements: int = 0
    nans_a: int = 0
    nans_b: int = 0
    lost: int = 0


def _compare(a: Tensor, b: Tensor) -> _Sums:
    sums = _Sums(elements=a.numel())
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.numel(), _CHUNK):
        left, right = flat_a[start : start + _CHUNK], flat_b[start : start + _CHUNK]
        # Exactly, where both are whole numbers that float64 would round.
        equal = left == right if left.dtype == right.dtype else left.double() == right.double()
        x, y = left.double(), right.double()
        nan_x, nan_y = x.isnan(), y.isnan()
        equal |= nan_x & nan_y
        numbers = ~(nan_x | nan_y)
        error = (x - y).abs().masked_fill_(equal | ~numbers, 0.0)
        finite = y.abs().masked_fill_(~y.isfinite(), 0.0)
        sums.largest = max(sums.largest, float(error.max()))
        sums.scale = max(sums.scale, float(finite.max()))
        sums.differing += int((~equal).sum())
        sums.nans_a += int(nan_x.sum())
        sums.nans_b += int(nan_y.sum())
        sums.lost += int((nan_x ^ nan_y).sum())
    return sums


def _difference(name: str, sums: _Sums, scale: float) -> Difference:
    measure = max(sums.scale, _SMALL * scale)
    if sums.largest == 0:
        # Differing whole numbers beyond 2^53 may have an error that float64 does not see.
        relative = 0.0 if sums.differing == sums.lost else math.ulp(1.0)
    else:
        relative = sums.largest / measure if measure else math.inf
    return Difference(
        name, sums.largest, relative, sums.differing, sums.elements, (sums.nans_a, sums.nans_b), sums.lost
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _show(report: Mapping[str, Any], differing: Sequence[Difference]) -> None:
    from rich.table import Table
    from rich.text import Text

    screen = console()
    told = report["told"]
    for line in told[:_SHOWN]:
        screen.print(printable(line), soft_wrap=True)
    if len(told) > _SHOWN:
        screen.print(f"and {len(told) - _SHOWN:,} more; out=FILE.json has all")
    if differing:
        table = Table(box=None, pad_edge=False)
        for column in ("tensor", "max |a-b|", "relative", "differing", "of", "NaNs"):
            table.add_column(column, justify="left" if column == "tensor" else "right")
        for item in differing[:_SHOWN]:
            cells = (f"{item.largest:.3e}", f"{item.relative:.3e}", f"{item.differing:,}", f"{item.elements:,}")
            table.add_row(Text(item.name), *cells, f"{item.nans[0]:,} / {item.nans[1]:,}" if any(item.nans) else "")
        screen.print(table)
        if len(differing) > _SHOWN:
            screen.print(f"and {len(differing) - _SHOWN:,} tensors more; out=FILE.json has all")
    within = f" within {report['tolerance']:g}" if report["tolerance"] else ""
    if report["same"]:
        screen.print(f"identical{within}: {report['compared']:,} tensors, the same names, shapes, values and counters")
    else:
        worst = f", relative error up to {max(item.relative for item in differing):.3e}" if differing else ""
        screen.print(
            f"different: {len(differing):,} of {report['compared']:,} tensors differ{within}{worst}"
            + (f"; {len(told):,} other differences" if told else ""),
            soft_wrap=True,
        )
