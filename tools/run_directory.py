"""A run's folder: decided once, held by one job at a time, and what a second start of the same run may change.

metrics.jsonl  config.yaml  environment.json  checkpoints/  tensorboard/  stacks/  (profile/)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gridtron.conf.refusal import Refusal
from gridtron.conf.schema import Plan, plan_to_dict
from gridtron.core.checkpoint.find import Found, find_checkpoint, list_reasons, newest_checkpoint
from gridtron.core.checkpoint.layout import CheckpointError, set_aside_newer, step_of, step_path
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.core.files import write_whole
from gridtron.core.training.metrics import cut_rows

CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.jsonl", "checkpoints"

_MATHEMATICS: Mapping[str, tuple[str, ...] | None] = {
    "model": None,
    "data": None,
    "optimizer": None,
    "lr_schedule": None,
    "precision": None,
    "train": ("steps", "global_batch_size", "sequence_length", "seed"),
}
"""Section -> its options that change what a run computes; None: all of them."""
_ELSEWHERE = ("data.directory",)
"""Options of those sections that say only where something is kept."""
_OF_ONE_START: Mapping[str, Mapping[str, Any]] = {
    "train": {"stop_after": None},
    "checkpoint": {"allow_changes": False, "resume": "auto"},
}
"""Options that were meant for the start they were given to: the next start does not inherit them."""


@dataclass(frozen=True)
class Decision:
    """What one process decides and hands to every rank.

    Args:
        plan: as ``plan_to_dict`` gives it.
        directory: of the run, absolute.
        checkpoint: to resume from; None: from the beginning.
        own: that checkpoint is one of this run's.
        overrides: as typed, for environment.json.
        notes: what a person should know at the start.
    """

    plan: dict[str, Any]
    directory: str
    checkpoint: str | None = None
    own: bool = True
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Decision:
        values = json.loads(text)
        return Decision(**values | {"overrides": tuple(values["overrides"]), "notes": tuple(values["notes"])})


# -------------------------------------------------------------------- which folder, and what it holds
def requested_directory(overrides: Sequence[str]) -> Path | None:
    """The folder that ``run.directory=`` names among overrides as typed; None where none does."""
    given = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("run.directory=")]
    if not given or given[-1] in ("", "null", "''", '""'):
        return None
    value = given[-1]
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1].replace(f"\\{value[0]}", value[0])
    return Path(value).expanduser().absolute()


def stored_plan(directory: Path | None) -> dict[str, Any] | None:
    """The plan that a run's config.yaml holds, without what was meant for one start; None where there is no run.

    Raises:
        Refusal: a config.yaml that is damaged, or results without one.
    """
    if directory is None:
        return None
    path = directory / CONFIG
    if not path.exists():
        results = [name for name in (METRICS, CHECKPOINTS) if (directory / name).exists()]
        if results:
            raise Refusal(
                [
                    f"run.directory={directory}: it holds {' and '.join(results)} but no {CONFIG}, so where they "
                    "come from is not known; give another folder, or move them away"
                ]
            )
        return None
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:120]
        raise Refusal([f"{path} cannot be read ({reason}); repair it, or give another run.directory"]) from None
    if not isinstance(content, dict) or not all(isinstance(content.get(section), dict) for section in _MATHEMATICS):
        raise Refusal([f"{path} does not hold a run's configuration; repair it, or give another run.directory"])
    for section, values in _OF_ONE_START.items():
        if isinstance(content.get(section), dict):
            content[section] |= values
    return content


def changed_mathematics(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Options that change what the run computes, as ``key: old -> new``; both plans as dictionaries."""
    found = []
    for section, names in _MATHEMATICS.items():
        old, new = before.get(section, {}), after.get(section, {})
        for name in names or sorted({*old, *new}):
            key = f"{section}.{name}"
            # An option that is not in an older file has its default in both.
            if key in _ELSEWHERE or name not in old:
                continue
            if _plain(old[name]) != _plain(new.get(name)):
                found.append(f"{key}: {old[name]} -> {new.get(name)}")
    return found


_OTHER_TENSORS = (
    *(f"model.{name}" for name in ("num_layers", "hidden_size", "vocab_size", "normalization", "position")),
    "model.tie_embeddings",
    "optimizer.name",
)
"""Options under which a checkpoint holds other tensors: told before the job begins; loading finds the rest."""


def _makes_other_tensors(change: str) -> bool:
    """Whether a change, as of :func:`changed_mathematics`, is one under which no checkpoint can be loaded."""
    key, _, values = change.partition(": ")
    old, _, new = values.partition(" -> ")
    if key == "precision.mode":
        # Narrow parameters have main weights beside them; which "auto" is, the device tells.
        return "auto" not in (old, new) and (old == "bf16") != (new == "bf16")
    return key in _OTHER_TENSORS


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


# -------------------------------------------------------------------- the decision
def decide(plan: Plan, stored: Mapping[str, Any] | None, overrides: Sequence[str], directory: Path) -> Decision | str:
    """Which checkpoint to go on from; or, as a message, why there is nothing left to do. Nothing is written.

    Args:
        plan: composed, on top of ``stored`` where there is a run.
        stored: of :func:`stored_plan`.
        overrides: as typed.
        directory: of the run, absolute.

    Raises:
        Refusal: the run may not be continued like this.
    """
    values = plan_to_dict(plan)
    values["run"]["directory"] = str(directory)
    resume = plan.checkpoint.resume
    if resume == "never" and (stored is not None or (directory / CHECKPOINTS).exists()):
        raise Refusal(
            [
                f"checkpoint.resume=never: {directory} holds a run already, which would be overwritten; "
                "give another run.directory, or leave checkpoint.resume out to go on with it"
            ]
        )
    found = newest_checkpoint(directory / CHECKPOINTS)
    try:
        checkpoint = _checkpoint(resume, directory, found)
    except CheckpointError as error:
        raise Refusal([f"checkpoint.resume={resume}: {error}"]) from None
    if checkpoint is None:
        began = (f"{directory} holds no checkpoint: starts from step 1",) if stored is not None else ()
        notes = (*began, *(f"skipped {reason}" for reason in found.skipped))
        return Decision(values, str(directory), overrides=tuple(overrides), notes=notes)
    own = checkpoint.parent == directory / CHECKPOINTS
    before = stored if own else _plan_of(checkpoint)
    changes = changed_mathematics(before, values) if before is not None else []
    if other := [change for change in changes if _makes_other_tensors(change)]:
        raise Refusal(
            [
                f"{checkpoint} holds other tensors than this run would: {'; '.join(other)}. Leave these out, or give "
                "another run.directory; checkpoint.allow_changes does not help here"
            ]
        )
    if changes and not plan.checkpoint.allow_changes:
        raise Refusal(
            [
                f"{checkpoint} was made with other mathematics: {'; '.join(changes)}. Leave these out, give "
                "another run.directory, or go on with them by checkpoint.allow_changes=true"
            ]
        )
    skipped = found.skipped if checkpoint == found.path else ()
    notes = (f"goes on from {checkpoint}", *(f"skipped {reason}" for reason in skipped))
    return _nothing_left(plan, checkpoint, directory) or Decision(
        values, str(directory), str(checkpoint), own, tuple(overrides), notes
    )


def _nothing_left(plan: Plan, checkpoint: Path, directory: Path) -> str | None:
    done = step_of(checkpoint) or 0
    if done >= plan.train.steps:
        return f"this run is finished: {done} of {plan.train.steps} steps are done ({directory})"
    if plan.train.stop_after is not None and done >= plan.train.stop_after:
        return (
            f"nothing to do: {done} steps are done and train.stop_after={plan.train.stop_after} ({directory}); "
            "set it higher, or leave it out to go on to the end"
        )
    return None


def _checkpoint(resume: str, directory: Path, found: Found) -> Path | None:
    """Where to go on: the newest of the run itself, but where ``resume`` names another of its own.

    Raises:
        CheckpointError: the run has checkpoints, and none that can be used; a path that holds none.
    """
    newest = found.path
    if resume in ("auto", "never"):
        if newest is None and found.damaged:
            raise CheckpointError(
                f"no checkpoint of {directory} can be used:{list_reasons(found.skipped)}\nPut one back from a "
                "backup, repair one (gridtron checkpoint verify), or start anew in another run.directory"
            )
        return newest
    named = find_checkpoint(Path(resume).expanduser().absolute())
    inside = named.parent.resolve() == (directory / CHECKPOINTS).resolve()
    if inside:
        return step_path(directory / CHECKPOINTS, step_of(named) or 0)
    # From another run: where this one began. What it did since is its own, so a job that is queued again goes on.
    return newest or named


def _plan_of(checkpoint: Path) -> dict[str, Any] | None:
    """The plan of the run that a checkpoint comes from; None where that is not to be found."""
    with contextlib.suppress(CheckpointError):
        plan = Manifest.read(checkpoint).extra.get("plan")
        if isinstance(plan, dict) and all(isinstance(plan.get(section), dict) for section in _MATHEMATICS):
            return plan
    with contextlib.suppress(Refusal):
        return stored_plan(checkpoint.parent.parent)
    return None


def new_directory(plan: Plan) -> Path:
    """Makes ``runs/TIME-NAME``, named after the experiment or the model.

    Raises:
        Refusal: a hundred of that name exist.
    """
    choices = plan.choices
    name = choices.get("experiment") or choices.get("model") or "run"
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        path = Path("runs", stem + suffix).absolute()
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise Refusal([f"runs/{stem} and 98 more like it exist; give run.directory"])


# -------------------------------------------------------------------- taking it
class RunLock:
    """Holds a run's folder against other jobs until this process, and those forked from it, are gone.

    Raises:
        Refusal: another job holds it.
    """

    def __init__(self, directory: Path):
        # The folder itself is locked: no file is left behind, and the lock ends with the process, however it ends.
        self._descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(self._descriptor)
                raise Refusal(
                    [f"run.directory={directory}: another job is writing there; wait for it, or give another folder"]
                ) from None
            # Some network file systems lock no folders: then nothing is held, as for any program without locks.

    def release(self) -> None:
        os.close(self._descriptor)


def open_run(decision: Decision) -> Decision:
    """Writes config.yaml and cuts the rows after the checkpoint; the folder must be held.

    Returns:
        The decision, with a note about what was cut.
    """
    import yaml

    directory = Path(decision.directory)
    done = (step_of(Path(decision.checkpoint)) or 0) if decision.checkpoint else 0
    content = yaml.safe_dump(decision.plan, sort_keys=False, allow_unicode=True).encode()
    path = directory / CONFIG
    if not path.exists() or path.read_bytes() != content:
        write_whole(path, content)
    cut = cut_rows(directory / METRICS, done)
    notes = decision.notes + ((f"{cut} rows of {METRICS} after step {done} were cut",) if cut else ())
    if decision.checkpoint and decision.own:
        moved = set_aside_newer(directory / CHECKPOINTS, done)
        notes += tuple(f"{old} is of what the run did after that, and is called {new} now" for old, new in moved)
    return Decision(decision.plan, decision.directory, decision.checkpoint, decision.own, decision.overrides, notes)
