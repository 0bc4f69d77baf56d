"""The process grid: which rank stands where (pure arithmetic), and its process groups (the one effect).

A grid has four axes. Outermost first, by default: pipeline, data, context, tensor, so that tensor ranks are
neighbours (Narayanan et al. 2021, arXiv:2104.04473, section 3).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gridtron.core.launch import Launcher, find_launcher
from gridtron.core.layout import AXIS_NAMES, GridSizes, resolve_sizes

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """One axis of a grid as one rank sees it.

    Args:
        name: "tensor", "data", ...; combined axes join their names with "+".
        size: number of ranks along the axis.
        rank: this process's place along it.
        ranks: the global ranks along it, in order.
        group: the process group over ``ranks``; None at size 1, and in a layout without processes.
        parts: axes over some of its ranks that were made from it, whose groups end with its own.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: ProcessGroup | None = field(default=None, compare=False, repr=False)
    parts: list[Axis] = field(default_factory=list, compare=False, repr=False)

    @staticmethod
    def of(value: Axis | DeviceMesh | ProcessGroup | None, name: str = "axis") -> Axis:
        """An Axis from whatever stands for one: an Axis, a one-dimensional DeviceMesh, a ProcessGroup or None.

        None is an axis of size 1, on which every collective returns at once.

        Raises:
            ValueError: a mesh of several dimensions, or another type.
        """
        if value is None:
            return Axis(name)
        if isinstance(value, Axis):
            return value
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(value, DeviceMesh):
            if value.ndim != 1:
                names: tuple[object, ...] = value.mesh_dim_names or tuple(range(value.ndim))
                raise ValueError(
                    f"an axis is one dimension of a mesh, and this mesh has {value.ndim}: {names}; "
                    f"pick one, as in mesh[{names[-1]!r}]"
                )
            name = value.mesh_dim_names[0] if value.mesh_dim_names else name
            return Axis._of_group(value.get_group(), name)
        if isinstance(value, dist.ProcessGroup):
            return Axis._of_group(value, name)
        raise ValueError(
            f"axis={value!r} is a {type(value).__name__}; give an Axis, a one-dimensional DeviceMesh, "
            "a ProcessGroup or None"
        )

    @staticmethod
    def _of_group(group: ProcessGroup, name: str) -> Axis:
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(group))
        return Axis(name, len(ranks), dist.get_rank(group), ranks, group if len(ranks) > 1 else None)

    def _close(self) -> None:
        """Lets go of the group for everyone who holds this axis; what uses it afterwards is told."""
        if self.group is not None:
            object.__setattr__(self, "group", _ClosedGroup(self.name))
        for part in self.parts:
            part._close()


class _ClosedGroup:
    """Stands where a process group was, once its grid is closed."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise ValueError(f"the grid of this {self._name} axis is closed; use its layers while it is open")


class Grid:
    """A 3D process grid (data x pipeline x tensor, with a place for context) as one rank sees it.

    Built by :meth:`create` (the effect), :meth:`layout` (arithmetic only) or :meth:`from_mesh`.

    Attributes:
        rank, world_size: of this process.
        device: torch.device of this rank; the CPU in a layout.
        mesh: DeviceMesh over all axes, or None in a process without torch.distributed.
        tensor, pipeline, data, context: Axis.
    """

    def __init__(
        self,
        sizes: GridSizes,
        rank: int,
        device: torch.device | None = None,
        groups: Mapping[str, ProcessGroup | None] | None = None,
        mesh: DeviceMesh | None = None,
        began: bool = False,
    ):
        self.sizes = sizes
        self.rank = rank
        self.world_size = sizes.world_size
        self.mesh = mesh
        self._device = device
        self._began = began
        place = sizes.coordinate(rank)
        self._axes = {
            name: Axis(name, sizes.sizes[name], place[name], sizes.ranks_along([name], rank), (groups or {}).get(name))
            for name in AXIS_NAMES
        }

    # ---------------------------------------------------------------- ways to make one
    @classmethod
    def layout(cls, world_size: int, rank: int = 0, order: Sequence[str] | None = None, **sizes: int) -> Grid:
        """The grid of any rank of a job of any size, by arithmetic alone; no process is started.

        Example:
            >>> Grid.layout(world_size=4096, rank=9, tensor=8, pipeline=16).coordinate(9)
            {'pipeline': 0, 'data': 1, 'context': 0, 'tensor': 1}
        """
        return cls(resolve_sizes(world_size, order, **sizes), rank)

    @classmethod
    def create(
        cls,
        data: int = -1,
        pipeline: int = 1,
        context: int = 1,
        tensor: int = 1,
        order: Sequence[str] | None = None,
        device: str | torch.device | None = None,
        backend: str | None = None,
        timeout: float = 600,
        launcher: Launcher | None = None,
    ) -> Grid:
        """The grid over the processes that are there: one without a launcher, all under torchrun, srun or mpirun.

        Joins a torch.distributed that already runs. A context manager: on leaving, what it began is ended.

        Args:
            data, pipeline, context, tensor: sizes; one may be -1 (what is left), data is unless another is.
            order: axes from the outermost inwards; default pipeline, data, context, tensor.
            device: default the CUDA device of the local rank, else the CPU.
            backend: default "nccl" on CUDA and "gloo" on the CPU.
            timeout: seconds after which a collective that waits for another rank fails.
            launcher: who started this process; default: read from the environment.

        Raises:
            ValueError: sizes that do not multiply to the number of processes.
        """
        import torch
        import torch.distributed as dist

        launcher = launcher or find_launcher(os.environ)
        running = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if running else launcher.world_size
        rank = dist.get_rank() if running else launcher.rank
        sizes = resolve_sizes(world_size, order, data=data, pipeline=pipeline, context=context, tensor=tensor)
        if device is None:
            device = f"cuda:{launcher.local_rank}" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        if device.type == "cuda":
            if device.index is None:
                device = torch.device("cuda", launcher.local_rank)
            torch.cuda.set_device(device)
        began = False
        if not running and launcher.init_method is not None:
            backend = backend or ("nccl" if device.type == "cuda" else "gloo")
            dist.init_process_group(
                backend,
                store=_fresh_store(launcher, timeout),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                # No device_id: NCCL would then split the world's communicator for each group below, which needs every
                # rank of the world in every split, and the groups are made by their members alone.
            )
            running = began = True
        if not running:
            return cls(sizes, rank, device)
        groups, mesh = _create_groups(sizes, rank, device, timeout)
        return cls(sizes, rank, device, groups, mesh, began)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, **axes: str) -> Grid:
        """Adopts a DeviceMesh: ``Grid.from_mesh(mesh, tensor="tp", data="dp")``; axes not named have size 1.

        Raises:
            ValueError: an axis or a mesh dimension that does not exist, or a mesh dimension left without an axis.
        """
        names = mesh.mesh_dim_names or ()
        unknown = set(axes) - set(AXIS_NAMES)
        if unknown:
            raise ValueError(f"unknown axes {sorted(unknown)}; a grid has {list(AXIS_NAMES)}")
        missing = [dim for dim in axes.values() if dim not in names]
        if missing:
            raise ValueError(f"the mesh has no dimension {missing[0]!r}; it has {list(names)}")
        left = [dim for dim in names if dim not in axes.values()]
        if left or not names:
            raise ValueError(
                f"mesh dimensions {left or mesh.ndim} have no axis; name each, as in tensor={(left or ['tp'])[0]!r}"
            )
        by_dim = {dim: axis for axis, dim in axes.items()}
        inner = [by_dim[dim] for dim in names]
        order = (*[name for name in AXIS_NAMES if name not in axes], *inner)
        sizes = {name: mesh[axes[name]].size() if name in axes else 1 for name in order}
        flat = mesh.mesh.flatten().tolist()
        if flat != list(range(len(flat))):
            raise ValueError("the mesh must list the ranks 0, 1, 2, ... in order; build it by init_device_mesh")
        import torch

        groups = {name: mesh[axes[name]].get_group() if sizes[name] > 1 else None for name in axes}
        device = (
            torch.device(mesh.device_type, torch.cuda.current_device())
            if mesh.device_type == "cuda"
            else torch.device(mesh.device_type)
        )
        return cls(resolve_sizes(len(flat), order, **sizes), mesh.get_rank(), device, groups, mesh)

    # ---------------------------------------------------------------- what it knows
    @property
    def device(self) -> torch.device:
        import torch

        return self._device if self._device is not None else torch.device("cpu")

    @property
    def tensor(self) -> Axis:
        return self._axes["tensor"]

    @property
    def pipeline(self) -> Axis:
        return self._axes["pipeline"]

    @property
    def data(self) -> Axis:
        return self._axes["data"]

    @property
    def context(self) -> Axis:
        return self._axes["context"]

    def axis(self, *names: str) -> Axis:
        """One axis, or several taken together: ``grid.axis("data", "context")`` runs over both.

        A combination of several axes above size 1 makes a process group at its first use: every rank of the grid
        must ask for it at the same point.
        """
        unknown = [name for name in names if name not in AXIS_NAMES]
        if unknown or not names:
            raise ValueError(f"unknown axis {unknown}; a grid has {list(AXIS_NAMES)}")
        ordered = tuple(name for name in self.sizes.order if name in names)
        if len(ordered) == 1:
            return self._axes[ordered[0]]
        wide = [name for name in ordered if self.sizes.sizes[name] > 1]
        group = self._axes[wide[0]].group if len(wide) == 1 else None
        return self._over("+".join(ordered), self.sizes.ranks_along(ordered, self.rank), group)

    def everyone(self, purpose: str) -> Axis:
        """All ranks as one axis, over a process group of its own on the CPU (Gloo), for what ranks agree on beside
        their work: collectives for one purpose do not meet those for another, whichever thread calls them.

        Made at its first use: every rank of the grid must ask for it at the same point.
        """
        return self._over(f"everyone[{purpose}]", tuple(range(self.world_size)), backend="gloo")

    def _over(
        self, key: str, ranks: tuple[int, ...], group: ProcessGroup | None = None, backend: str | None = None
    ) -> Axis:
        """The axis ``key`` over ``ranks``; without a group one is made by them alone, where there are several."""
        if key not in self._axes:
            if group is None and len(ranks) > 1 and self.mesh is not None:
                import torch.distributed as dist

                # Groups made by their members alone are named by how many groups a rank has: after :meth:`part` that
                # differs over the grid, so that one over all of it takes its name from what all have made together.
                alone = len(ranks) < self.world_size
                group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=alone)
            self._axes[key] = Axis(key, len(ranks), ranks.index(self.rank), ranks, group)
        return self._axes[key]

    def part(self, name: str, places: Sequence[int]) -> Axis:
        """Some ranks of an axis, by their places on it, as an axis of their own; the whole axis where all are named.

        Called by those ranks alone, each at the same point of its program: the process group is made by its members.

        Raises:
            ValueError: places that are not on the axis, or without this rank's.
        """
        axis = self.axis(name)
        chosen = sorted(set(places))
        if axis.rank not in chosen or chosen[0] < 0 or chosen[-1] >= axis.size:
            raise ValueError(f"places={chosen} of the {name} axis: they lie in 0:{axis.size} and hold {axis.rank}")
        if len(chosen) == axis.size:
            return axis
        ranks = tuple(axis.ranks[place] for place in chosen)
        return self._over(f"{name}[{','.join(map(str, chosen))}]", ranks)

    def coordinate(self, rank: int | None = None) -> dict[str, int]:
        """Place of a rank (default: this one) on every axis, in the grid's order."""
        return self.sizes.coordinate(self.rank if rank is None else rank)

    def close(self) -> None:
        """Ends the torch.distributed that :meth:`create` began; leaves one that ran before alone.

        The grid still knows its sizes and coordinates; collectives over its axes raise ValueError from then on.
        """
        if self._began:
            import torch.distributed as dist

            self._began = False
            if dist.is_initialized():
                dist.destroy_process_group()
            # A group is gone, and its threads joined, only when nobody refers to it. A thread of Gloo's that still
            # lets go of its last tensor while the interpreter ends aborts the process.
            for axis in self._axes.values():
                axis._close()
            self.mesh = None

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        # After a failure the peers may wait in a collective: ending the group would wait for them and hide it.
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={self.sizes.sizes[name]}" for name in self.sizes.order)
        return f"Grid({sizes}; rank {self.rank} of {self.world_size})"


def _fresh_store(launcher: Launcher, timeout: float) -> Store:
    """The launcher's store under a prefix of its own for each time that a process joins.

    torchrun's store outlives a process group: a second one would read the addresses of the first and wait for them.
    """
    import torch.distributed as dist

    assert launcher.init_method is not None
    store, rank, _ = next(
        dist.rendezvous(launcher.init_method, launcher.rank, launcher.world_size, timeout=timedelta(seconds=timeout))
    )
    store.set_timeout(timedelta(seconds=timeout))
    return dist.PrefixStore(f"gridtron/{store.add(f'gridtron/joined/{rank}', 1)}", store)


def _create_groups(
    sizes: GridSizes, rank: int, device: torch.device, timeout: float
) -> tuple[dict[str, ProcessGroup | None], DeviceMesh]:
    """One process group an axis, made by its members alone, and the DeviceMesh over them.

    DeviceMesh's own groups take torch's default timeout instead of ours, hence groups first and the mesh from them.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    def group_over(ranks: tuple[int, ...]) -> ProcessGroup:
        if len(ranks) == sizes.world_size:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), use_local_synchronization=True)

    alone = group_over((rank,))
    made = {
        name: group_over(sizes.ranks_along([name], rank)) if sizes.sizes[name] > 1 else alone for name in sizes.order
    }
    shape = [sizes.sizes[name] for name in sizes.order]
    ranks = torch.arange(sizes.world_size).view(shape)
    mesh = DeviceMesh.from_group(list(made.values()), device.type, mesh=ranks, mesh_dim_names=sizes.order)
    return {name: group if sizes.sizes[name] > 1 else None for name, group in made.items()}, mesh
