"""Which checkpoint a run goes on from: the newest that is complete and undamaged, and why newer ones are not it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gridtron.core.checkpoint.layout import (
    MANIFEST,
    CheckpointError,
    complete_checkpoints,
    named_checkpoints,
    step_of,
    unfinished_checkpoints,
)

_LISTED = 3


@dataclass(frozen=True)
class Found:
    """What lies in a folder of checkpoints.

    Args:
        path: the newest that can be used; None where there is none.
        skipped: newer than it, with the reason, newest first.
        damaged: some were complete once and cannot be used.
    """

    path: Path | None
    skipped: tuple[str, ...] = ()
    damaged: bool = False


def newest_checkpoint(root: Path) -> Found:
    """Looks through the checkpoints under ``root``: manifest, sizes and headers of files, not their data."""
    if not (named := named_checkpoints(root)):
        return Found(None, _interrupted(root))
    skipped = list(_interrupted(root))
    for path in reversed(named):
        try:
            _check(path)
        except CheckpointError as error:
            skipped.append(f"{path.name}: {error}")
            continue
        return Found(path, tuple(skipped), path != named[-1])
    return Found(None, tuple(skipped), damaged=True)


def _check(path: Path) -> None:
    """Manifest, sizes and headers, and that the name is of the step which was saved.

    Raises:
        CheckpointError: what is wrong.
    """
    from gridtron.core.checkpoint.stored import Stored  # needs torch: a run that begins does not wait for it

    stored = Stored(path)
    stored.check_files()
    progress = stored.manifest.extra.get("progress")
    step = progress.get("step") if isinstance(progress, Mapping) else None
    if step is not None and step != step_of(path):
        raise CheckpointError(f"its manifest is of step {step!r:.40}: somebody renamed it; give it back its name")


def _interrupted(root: Path) -> tuple[str, ...]:
    left = (path.name for path in unfinished_checkpoints(root) if path.suffix == ".tmp")
    return tuple(f"{name}: the job that was writing it ended before it was complete" for name in left)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint meant by ``path``: itself, or the newest of a run's folder or of its ``checkpoints`` folder.

    Raises:
        CheckpointError: there is none.
    """
    found = look_for(path).path
    assert found is not None
    return found


def look_for(path: Path, damaged: bool = False) -> Found:
    """:func:`find_checkpoint`, with what was skipped.

    Args:
        path: of a checkpoint, of a run, or of its checkpoints.
        damaged: of several, the newest by its name, whatever its data files are like.

    Raises:
        CheckpointError: there is none.
    """
    # A link in the manifest's place is refused when it is opened.
    if (path / MANIFEST).is_file() or (path / MANIFEST).is_symlink():
        return Found(path)
    skipped: tuple[str, ...] = ()
    for root in (path, path / "checkpoints"):
        if damaged and (complete := complete_checkpoints(root)):
            return Found(complete[-1])
        found = newest_checkpoint(root)
        if found.path is not None:
            return found
        skipped += found.skipped
    why = "" if path.is_dir() else " (there is no such folder)"
    raise CheckpointError(
        f"{path} holds no complete checkpoint{why}; give the folder of one (step-00000010), or of its run"
        + list_reasons(skipped)
    )


def list_reasons(skipped: Sequence[str]) -> str:
    """Why checkpoints were skipped, a line each, for the end of a message; the first few, and how many more."""
    more = [f"and {len(skipped) - _LISTED} more"] if len(skipped) > _LISTED else []
    return "".join(f"\n  {reason}" for reason in [*skipped[:_LISTED], *more])
