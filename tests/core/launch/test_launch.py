"""Who am I, from the variables of every launcher."""

import pytest

from gridtron.core.launch import Launcher, expand_counts, expand_nodes, find_launcher

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1234",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launcher()),
        (TORCHRUN, Launcher("torchrun", 3, 8, 1, 2, "env://")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launcher("torchrun", 0, 1, 0, 1, None)),
        # srun torchrun: the inner launcher counts
        (SRUN | TORCHRUN, Launcher("torchrun", 3, 8, 1, 2, "env://")),
        (SRUN, Launcher("srun", 3, 6, 1, 2, f"tcp://gpu07:{15000 + 64 * 77 % 17000}")),
        (SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "9"}, Launcher("srun", 3, 6, 1, 2, "tcp://b:9")),
        # the step is smaller than the allocation
        (SRUN | {"SLURM_NTASKS": "64"}, Launcher("srun", 3, 6, 1, 2, f"tcp://gpu07:{15000 + 64 * 77 % 17000}")),
        # a salloc shell; an sbatch script; Slurm's interactive step; `srun --pty bash`
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_NODELIST": "gpu1"}, Launcher()),
        (without(SRUN, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS") | {"SLURM_PROCID": "0"}, Launcher()),
        (SRUN | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, Launcher()),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, Launcher()),
        # mpirun's helpers are started by srun, whose variables describe the helper
        (SRUN | MPIRUN | {"MASTER_PORT": "5"}, Launcher("mpirun", 1, 4, 1, 4, "tcp://127.0.0.1:5")),
        (
            MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            Launcher(),
        ),
        (
            MPIRUN | {"OMPI_COMM_WORLD_SIZE": "8", "MASTER_ADDR": "c", "MASTER_PORT": "6"},
            Launcher("mpirun", 1, 8, 1, 4, "tcp://c:6"),
        ),
    ],
)
def test_every_launcher_is_read(environment: dict[str, str], expected: Launcher) -> None:
    assert find_launcher(environment) == expected


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1'"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 with WORLD_SIZE=8"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID"),
        (without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST"),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[1-"}, "brackets"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE"),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE"),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "8"}, "MASTER_ADDR"),
    ],
)
def test_half_set_variables_are_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        find_launcher(environment)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("n[1]-ib.cluster", ["n1-ib.cluster"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_node_lists_expand(nodes: str, expected: list[str]) -> None:
    assert expand_nodes(nodes) == expected


@pytest.mark.parametrize("nodes", ["", ",", "n[3-1]", "n[a-b]", "n[1-2", "n1-2]"])
def test_bad_node_lists_are_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand_nodes(nodes)


def test_task_counts_expand() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="form"):
        expand_counts("2(y3)")
