"""From a family's name to a schedule."""

from __future__ import annotations

from pathlib import Path

from gridtron.parallel.pipeline.families import dualpipe_v, gpipe, interleaved_1f1b, one_f_one_b, zb_v, zero_bubble
from gridtron.parallel.pipeline.families.family import Family
from gridtron.parallel.pipeline.schedule import Schedule

# A new schedule is a file in families/ and its line here.
FAMILIES = {
    family.name: family
    for family in (
        gpipe.FAMILY,
        one_f_one_b.FAMILY,
        interleaved_1f1b.FAMILY,
        zero_bubble.H1,
        zero_bubble.H2,
        zb_v.FAMILY,
        dualpipe_v.FAMILY,
    )
}


_MOST = 4_000_000
"""Forward passes of a table: some ten times those of the largest runs known, and still minutes to prove."""


def build_schedule(name: str | Family, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The table of a family, or that of a file.

    Args:
        name: a family's (``FAMILIES``), the path of a ``.csv`` file, or a Family of your own.
        ranks: of the pipeline axis.
        microbatches: of one step, any number from 1.
        chunks: stages per rank; default: the family's own.

    Raises:
        ValueError: an unknown name, a number below 1, chunks that the family does not have, a file for other numbers.

    Example:
        >>> build_schedule("1f1b", ranks=2, microbatches=2).actions[1]
        (Action(kind='F', stage=1, microbatch=0), Action(kind='B', stage=1, microbatch=0), \
Action(kind='F', stage=1, microbatch=1), Action(kind='B', stage=1, microbatch=1))
    """
    for key, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", 1 if chunks is None else chunks)):
        if value < 1:
            raise ValueError(f"{key}={value} of a pipeline schedule: there is at least one; nearest: {key}=1")
    if isinstance(name, str) and name.endswith(".csv"):
        return _from_file(name, ranks, microbatches, chunks)
    family = name if isinstance(name, Family) else FAMILIES.get(name)
    if family is None:
        raise ValueError(_unknown(str(name)))
    count = family.chunks if chunks is None else chunks
    if count != family.chunks and not family.any_chunks:
        raise ValueError(
            f"chunks={count} with the schedule {family.name}, which has {family.chunks} stages a rank; "
            f"nearest: chunks={family.chunks}"
        )
    if ranks * microbatches * count > _MOST:
        raise ValueError(
            f"ranks={ranks}, microbatches={microbatches} and chunks={count} make a table of "
            f"{ranks * microbatches * count:,} forward passes; at most {_MOST:,} are built"
        )
    rows = family.rows(ranks, microbatches, count)
    return Schedule(family.name, microbatches, family.placement(ranks, count), tuple(map(tuple, rows)))


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, FAMILIES, n=1, cutoff=0.5)
    hint = f"; nearest: {near[0]}" if near else ""
    return f"schedule={name!r}: it is one of {', '.join(FAMILIES)}, or a file with the ending .csv{hint}"


def _from_file(path: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    from gridtron.parallel.pipeline.csv_table import read_csv

    schedule = read_csv(Path(path))
    found = {"ranks": schedule.ranks, "microbatches": schedule.microbatches}
    asked = {"ranks": ranks, "microbatches": microbatches}
    if chunks is not None:
        asked["chunks"] = chunks
        found["chunks"] = max(len(schedule.stages(rank)) for rank in range(schedule.ranks))
    wrong = [key for key in asked if asked[key] != found[key]]
    if wrong:
        raise ValueError(
            f"{', '.join(f'{key}={asked[key]}' for key in wrong)} with the schedule of {path}, a table for "
            f"{', '.join(f'{key}={found[key]}' for key in wrong)}; take that, or a family: {', '.join(FAMILIES)}"
        )
    return schedule
