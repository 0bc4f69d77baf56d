"""environment.json of a run: what each of its starts ran on, and whether its data is still what it was."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gridtron.core.errors import JobError
from gridtron.core.files import write_whole
from gridtron.tools.run_directory import Decision

ENVIRONMENT = "environment.json"


def check_data(directory: Path, facts: Mapping[str, Any]) -> None:
    """Whether the data under the run's path is what the run read before, by the hash that environment.json holds.

    Raises:
        JobError: it is not.
    """
    before: Any = None
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        before = json.loads((directory / ENVIRONMENT).read_text())["data"]["sha256"]
    data = facts.get("data")
    after = data.get("sha256") if isinstance(data, Mapping) else None
    if before is not None and after is not None and before != after:
        raise JobError(
            f"the data changed since this run read it (sha256 {before[:12]}... then, {after[:12]}... now): the same "
            "position holds other samples. Give the data as it was, another run.directory, or go on with it by "
            "checkpoint.allow_changes=true"
        )


def write_environment(decision: Decision, facts: Mapping[str, Any]) -> None:
    """What this start of the run ran on; starts before it are kept under ``earlier``.

    Args:
        decision: of this start.
        facts: of the assembled run: data files with size and hash, devices, grid.
    """
    path = Path(decision.directory) / ENVIRONMENT
    earlier: list[Any] = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        before = json.loads(path.read_text())
        earlier = [*before.pop("earlier", []), before]
    content = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "overrides": list(decision.overrides),
        "resumed_from": decision.checkpoint,
        "seed": decision.plan["train"]["seed"],
        "versions": _versions(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "commit": source_commit(Path(__file__).resolve().parents[1]),
        **facts,
        "earlier": earlier,
    }
    write_whole(path, (json.dumps(content, indent=1, default=str) + "\n").encode())


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("gridtron", "torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tokenizers", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def source_commit(root: Path) -> str | None:
    """The git commit of the source tree ``root``, with "+changes" where it was edited; None outside a clone."""
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
