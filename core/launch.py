"""Who am I: the launcher's environment read once, at an entry point.

torchrun, srun and Open MPI each describe the processes they started in their own variables. ``find_launcher`` turns
them into one value. A Slurm allocation without srun (a bare ``salloc`` shell, an ``sbatch`` script) has started no
processes and is none.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class LaunchConfig:
    processes: str | int = option("auto", "auto: what the launcher started, else what the grid needs; or a number")
    preempted_exit: int = option(
        0, "exit code of a run that SIGTERM or SIGUSR1 made save and end before its last step", minimum=0, maximum=255
    )


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
    """The launcher that ``environment`` (usually ``os.environ``) describes; a single process if none does.

    torchrun comes first, since srun and mpirun may start it; Open MPI comes before Slurm, since mpirun starts its
    helpers by srun, whose variables then describe the helper.

    Raises:
        ValueError: variables of a launcher that are incomplete, not numbers, or contradict one another.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _torchrun(environment)
    if "OMPI_COMM_WORLD_RANK" in environment or "OMPI_COMM_WORLD_SIZE" in environment:
        return _open_mpi(environment)
    if _is_slurm_task(environment):
        return _srun(environment)
    return Launcher()


def _torchrun(environment: Mapping[str, str]) -> Launcher:
    started = "torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together"
    rank = _number(environment, "RANK", started)
    world_size = _number(environment, "WORLD_SIZE", started)
    if world_size > 1 or "MASTER_ADDR" in environment:
        _number(environment, "MASTER_PORT", started)
        _required(environment, "MASTER_ADDR", started)
        init_method = "env://"
    else:
        init_method = None
    local_rank = _number(environment, "LOCAL_RANK", started, default=0)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", started, default=1)
    return _checked(
        Launcher("torchrun", rank, world_size, local_rank, local_world_size, init_method), "RANK", "WORLD_SIZE"
    )


def _open_mpi(environment: Mapping[str, str]) -> Launcher:
    started = "Open MPI's mpirun sets every OMPI_COMM_WORLD_ variable"
    rank = _number(environment, "OMPI_COMM_WORLD_RANK", started)
    world_size = _number(environment, "OMPI_COMM_WORLD_SIZE", started)
    local_rank = _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", started)
    local_world_size = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", started)
    launcher = _checked(
        Launcher("mpirun", rank, world_size, local_rank, local_world_size),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
    )
    if world_size == 1:
        return Launcher()
    address = environment.get("MASTER_ADDR")
    if address is None and local_world_size < world_size:
        raise ValueError(
            f"mpirun started {world_size} processes, {local_world_size} of them here, and MASTER_ADDR is not set: "
            "name the machine of rank 0, as in mpirun -x MASTER_ADDR=host1 -x MASTER_PORT=29500 ..."
        )
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or ""
    return _joined(launcher, address or "127.0.0.1", environment, zlib.crc32(job.encode()))


_FIRST_RESERVED_STEP = 0xFFFFFFF0
"""Slurm numbers the batch script, the interactive shell and the like from the top of 32 bits; srun's from 0."""


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process: sbatch scripts have SLURM_PROCID too, and salloc shells SLURM_NTASKS."""
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID"))
    if step is None or "SLURM_PROCID" not in environment:
        return False
    return not (step.isdigit() and int(step) >= _FIRST_RESERVED_STEP)


def _srun(environment: Mapping[str, str]) -> Launcher:
    started = "srun sets SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_ID and SLURM_NTASKS together"
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    rank = _number(environment, "SLURM_PROCID", started)
    world_size = _number(environment, size_name, started)
    if world_size == 1:
        # `srun --pty bash` is one task: its shell may start processes of its own.
        return Launcher()
    local_rank = _number(environment, "SLURM_LOCALID", started)
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE"))
    node = _number(environment, "SLURM_NODEID", started, default=0)
    per_node = expand_counts(tasks) if tasks else []
    local_world_size = per_node[node] if node < len(per_node) else local_rank + 1
    launcher = _checked(Launcher("srun", rank, world_size, local_rank, local_world_size), "SLURM_PROCID", size_name)
    address = environment.get("MASTER_ADDR")
    if address is None:
        nodes = environment.get(
            "SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", environment.get("SLURM_JOB_NODELIST"))
        )
        if not nodes:
            raise ValueError(
                f"srun started {world_size} tasks and neither SLURM_STEP_NODELIST nor MASTER_ADDR is set: "
                "set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port there"
            )
        address = expand_nodes(nodes)[0]
    job = _number(environment, "SLURM_JOB_ID", started, default=0)
    step = _number(environment, "SLURM_STEP_ID", started, default=0)
    return _joined(launcher, address, environment, 64 * job + step)


_FIRST_PORT, _PORTS = 15000, 17000
"""Below the range from which Linux hands out ports by itself (32768 and up)."""


def _joined(launcher: Launcher, address: str, environment: Mapping[str, str], job: int) -> Launcher:
    """With the rendezvous at ``address``; without MASTER_PORT at a port that is a function of the job's number."""
    port = _number(environment, "MASTER_PORT", "MASTER_PORT is a port", default=_FIRST_PORT + job % _PORTS)
    return Launcher(
        launcher.name,
        launcher.rank,
        launcher.world_size,
        launcher.local_rank,
        launcher.local_world_size,
        f"tcp://{address}:{port}",
    )


def expand_nodes(nodes: str) -> list[str]:
    """Host names of a Slurm node list: ``expand_nodes("gpu[01-02,7],login")`` is gpu01, gpu02, gpu7, login.

    Raises:
        ValueError: brackets that do not match, or an empty range.
    """
    names: list[str] = []
    for part in _split_outside_brackets(nodes):
        expanded = [""]
        for text, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            choices = [text] if text else [number for item in ranges.split(",") for number in _range(item, nodes)]
            expanded = [head + choice for head in expanded for choice in choices]
        names.extend(expanded)
    if not names or not all(names):
        raise ValueError(f"the node list {nodes!r} names no host; expected one like node[01-04],node07")
    return names


def _split_outside_brackets(nodes: str) -> list[str]:
    if nodes.count("[") != nodes.count("]"):
        raise ValueError(
            f"the node list {nodes!r} has brackets that do not match; expected one like node[01-04],node07"
        )
    return [part for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes) if part]


def _range(item: str, nodes: str) -> list[str]:
    matched = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
    if not matched:
        raise ValueError(f"the node list {nodes!r} has the range {item!r}; expected numbers, as in node[01-04,7]")
    first, last = matched[1], matched[2] or matched[1]
    if int(last) < int(first):
        raise ValueError(f"the node list {nodes!r} has the empty range {item!r}")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def expand_counts(counts: str) -> list[int]:
    """Tasks of each node from Slurm's short form: ``expand_counts("2(x3),1")`` is [2, 2, 2, 1].

    Raises:
        ValueError: another form.
    """
    found: list[int] = []
    for part in counts.split(","):
        matched = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not matched:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={counts!r} is not of the form 2(x3),1")
        found.extend([int(matched[1])] * int(matched[2] or 1))
    return found


def threads_each(processes: int) -> int:
    """Threads for each of ``processes`` on the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // processes)


def _required(environment: Mapping[str, str], name: str, started: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise ValueError(
            f"{name} is not set, though other variables of its launcher are: {started}; start again by it, or unset all"
        )
    return value


def _number(environment: Mapping[str, str], name: str, started: str, default: int | None = None) -> int:
    if default is not None and name not in environment:
        return default
    value = _required(environment, name, started)
    if not value.isdigit():
        raise ValueError(f"{name}={value!r} is not a whole number from 0; {started}")
    return int(value)


def _checked(launcher: Launcher, rank_name: str, size_name: str) -> Launcher:
    if launcher.rank >= launcher.world_size:
        raise ValueError(
            f"{rank_name}={launcher.rank} with {size_name}={launcher.world_size}: ranks go from 0 to {size_name} - 1"
        )
    return launcher
