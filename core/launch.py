"""Who am I: the launcher's environment read once, at an entry point.

torchrun, srun and Open MPI each describe the processes they started in their own variables. ``find_launcher`` turns
them into one value. A Slurm allocation without srun (a bare ``salloc`` shell) has started no processes and is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class LaunchConfig:
    processes: str | int = option("auto", "auto: what the launcher started, else what the grid needs; or a number")


@dataclass(frozen=True)
class Launcher:
    """What started this process, and where it stands among its siblings.

    Args:
        name: "torchrun", "srun", "mpirun", "local" (this project's own) or "none" (a single process).
        rank: global rank, 0 to world_size - 1.
        world_size: number of processes of the job.
        local_rank: rank on this machine, which picks the device.
        local_world_size: number of the job's processes on this machine.
        init_method: URL of the rendezvous for torch.distributed; None when nothing is to be joined.
    """

    name: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    init_method: str | None = None


def find_launcher(environment: Mapping[str, str]) -> Launcher:
    """The launcher that ``environment`` (usually ``os.environ``) describes; a single process if none does."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Launcher(
            "torchrun",
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment.get("LOCAL_RANK", 0)),
            int(environment.get("LOCAL_WORLD_SIZE", 1)),
            "env://",
        )
    return Launcher()
