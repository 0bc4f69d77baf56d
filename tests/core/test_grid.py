"""Rank arithmetic over its whole range, and grids over real processes."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from ranks import run_ranks

from gridtron.core import Axis, Grid
from gridtron.core.communication import all_reduce
from gridtron.core.layout import AXIS_NAMES, resolve_sizes


def factorisations(world_size):
    for pipeline in range(1, world_size + 1):
        for tensor in range(1, world_size + 1):
            if world_size % (pipeline * tensor) == 0:
                yield {"pipeline": pipeline, "tensor": tensor, "data": world_size // (pipeline * tensor)}


@pytest.mark.parametrize("world_size", [1, 2, 6, 8, 12])
def test_every_rank_stands_in_one_place(world_size):
    for sizes in factorisations(world_size):
        for order in itertools.permutations(AXIS_NAMES):
            grid = Grid.layout(world_size=world_size, order=order, **sizes)
            places = [tuple(grid.coordinate(rank).values()) for rank in range(world_size)]
            # Row-major in the grid's order: the last axis's ranks are neighbours.
            assert places == sorted(set(places)) and len(places) == world_size
            assert all(grid.sizes.rank_at(grid.coordinate(rank)) == rank for rank in range(world_size))


@pytest.mark.parametrize("world_size", [6, 8])
def test_axes_partition_the_ranks(world_size):
    for sizes in factorisations(world_size):
        for names in [("tensor",), ("data",), ("pipeline",), ("data", "context"), ("pipeline", "tensor")]:
            seen = []
            for rank in range(world_size):
                axis = Grid.layout(world_size=world_size, rank=rank, **sizes).axis(*names)
                assert axis.ranks[axis.rank] == rank and len(axis.ranks) == axis.size
                if axis.rank == 0:
                    seen += axis.ranks
            assert sorted(seen) == list(range(world_size))


def test_default_order_and_large_jobs():
    grid = Grid.layout(world_size=4096, rank=4095, tensor=8, pipeline=16)
    assert list(grid.coordinate(9)) == ["pipeline", "data", "context", "tensor"]
    assert grid.coordinate(9) == {"pipeline": 0, "data": 1, "context": 0, "tensor": 1}
    assert grid.coordinate(4095) == {"pipeline": 15, "data": 31, "context": 0, "tensor": 7}
    assert (grid.data.size, grid.tensor.ranks[0], grid.mesh, grid.tensor.group) == (32, 4088, None, None)


@pytest.mark.parametrize(
    ("world_size", "sizes", "words"),
    [
        (8, {"tensor": 3}, ["tensor=3", "does not divide the 8 ranks", "tensor=2"]),
        (8, {"tensor": 2, "data": 2}, ["is 4 ranks and there are 8"]),
        (1, {"tensor": 2}, ["--nproc-per-node 2"]),
        (8, {"tensor": 0}, ["tensor=0", "at least 1"]),
        (8, {"tensor": -2}, ["tensor=-2"]),
        (8, {"tensor": -1, "pipeline": -1}, ["only one axis may be -1"]),
        (8, {"context": 2}, ["context=2", "not built yet"]),
        (8, {"tenzor": 2}, ["unknown axes ['tenzor']"]),
    ],
)
def test_sizes_that_do_not_fit(world_size, sizes, words):
    with pytest.raises(ValueError) as raised:
        resolve_sizes(world_size, **sizes)
    assert all(word in str(raised.value) for word in words), raised.value


def test_what_is_left():
    assert dict(resolve_sizes(8, tensor=-1).sizes) == {"pipeline": 1, "data": 1, "context": 1, "tensor": 8}
    assert resolve_sizes(8, tensor=2).sizes["data"] == 4
    assert resolve_sizes(8, data=2, pipeline=-1).sizes["pipeline"] == 4
    with pytest.raises(ValueError, match="once, outermost first"):
        resolve_sizes(8, order=["data", "tensor"])
    with pytest.raises(ValueError, match="outside this grid of 8"):
        resolve_sizes(8).coordinate(8)


def test_one_process_needs_no_torch_distributed():
    import torch.distributed as dist

    with Grid.create() as grid:
        assert grid.mesh is None and grid.world_size == 1 and not dist.is_initialized()
        assert Axis.of(None).size == 1 and Axis.of(grid.tensor) is grid.tensor
    with pytest.raises(ValueError, match="start 2 processes"):
        Grid.create(tensor=2)
    with pytest.raises(ValueError, match="give an Axis"):
        Axis.of("tensor")


def check_groups():
    import torch
    import torch.distributed as dist

    with Grid.create(pipeline=2, data=2, tensor=2) as grid:
        sums = {}
        for names in [("tensor",), ("data",), ("pipeline",), ("pipeline", "tensor"), ("data", "tensor")]:
            axis = grid.axis(*names)
            number = torch.tensor(grid.rank)
            dist.all_reduce(number, group=axis.group)
            assert int(number) == sum(axis.ranks), names
            sums[names] = int(number)
        assert grid.mesh is not None and grid.mesh["tensor"].size() == 2
        assert grid.axis("data", "context").group is grid.data.group
        with pytest.raises(ValueError, match="pick one"):
            Axis.of(grid.mesh)
    assert dist.is_initialized(), "a torch.distributed that ran before is left alone"
    return grid.coordinate()


def test_groups_over_real_ranks():
    coordinates = run_ranks(check_groups, 8)
    assert coordinates == [Grid.layout(8, pipeline=2, tensor=2).coordinate(rank) for rank in range(8)]


def check_from_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    grid = Grid.from_mesh(mesh, tensor="tp", data="dp")
    with pytest.raises(ValueError, match=r"\['tp'\] have no axis"):
        Grid.from_mesh(mesh, data="dp")
    with pytest.raises(ValueError, match="no dimension 'mp'"):
        Grid.from_mesh(mesh, tensor="mp", data="dp")
    return grid.coordinate(), grid.tensor.ranks, grid.data.ranks


def groups_after_a_part():
    """Groups over all ranks, made when some ranks have one more than others (a stage that shares its embedding)."""
    with Grid.create(pipeline=3, data=2) as grid:
        if grid.pipeline.rank != 1:
            part = grid.part("pipeline", [0, 2])
            assert int(all_reduce(torch.ones(1), part)) == 2
        found = [grid.everyone("one"), grid.axis(*AXIS_NAMES), grid.everyone("other")]
        assert len({id(axis.group) for axis in found}) == 3
        assert found[0] is grid.everyone("one")
        return [int(all_reduce(torch.tensor(grid.rank), axis)) for axis in found]


def test_groups_over_all_ranks_after_groups_of_some():
    assert run_ranks(groups_after_a_part, 6) == [[15, 15, 15]] * 6


def test_adopts_a_mesh():
    for rank, (coordinate, tensor, data) in enumerate(run_ranks(check_from_mesh, 4)):
        assert (coordinate["data"], coordinate["tensor"]) == divmod(rank, 2)
        assert tensor == (rank // 2 * 2, rank // 2 * 2 + 1) and data == (rank % 2, rank % 2 + 2)


AGAIN = """
import os, torch, torch.distributed as dist
from gridtron.core import Grid
from gridtron.parallel import TensorParallelLinear
threads = lambda: len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
for tensor in (2, 1, 2):
    with Grid.create(tensor=tensor) as grid:
        layer = TensorParallelLinear(4, 4, axis=grid.tensor, gather_output=True)
        layer(torch.ones(1, 4))
        number = torch.ones(1)
        dist.all_reduce(number)
        assert int(number) == 2 and grid.tensor.size == tensor
        running = threads()
    assert not dist.is_initialized()
    assert grid.coordinate()["tensor"] == (grid.rank if tensor == 2 else 0)
    # The layer lives on, and yet the threads have ended: one that meets the interpreter's end may abort it.
    assert threads() < running or not running, (threads(), running)
    if tensor == 2:
        try:
            layer(torch.ones(1, 4))
        except ValueError as error:
            assert "the grid of this tensor axis is closed" in str(error), error
        else:
            raise AssertionError("a closed grid was used")
"""


def test_grids_one_after_another_under_a_launcher(tmp_path):
    """The launcher's store outlives a process group; the next one must not read the last one's addresses."""
    (tmp_path / "again.py").write_text(AGAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "again.py")], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_context_is_refused_by_name_before_anything_else():
    with pytest.raises(ValueError, match="context=2: context parallelism is not built yet"):
        Grid.create(context=2)
    with pytest.raises(ValueError, match="not built yet"):
        resolve_sizes(8, context=-1)
