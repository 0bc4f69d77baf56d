"""ZeRO-3 by torch's FSDP2: parameters, gradients and optimizer states cut over ranks, gathered layer by layer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gridtron.core.communication import all_reduce
from gridtron.core.grid import Axis
from gridtron.core.pieces import Piece, Range
from gridtron.core.precision import wide_dtype
from gridtron.core.sharding import Sharding
from gridtron.core.torch_compat import fsdp_add_gradient, fsdp_can_defer, fsdp_parameters, fsdp_reduce
from gridtron.parallel.data_parallel.wrapping import not_for_fsdp, roots_of, wrap
from gridtron.parallel.gradient_door import weakly


class FullyShard:
    """A module whose layers FSDP2 wraps, its sums plain.

    What the optimizer updates is this rank's rows of the wide main weights; layers compute on copies gathered in the
    module's own dtype.

    Args:
        module: with ``stages`` ({stage: module}), each stage is a root of its own, as a pipeline calls it; items of its
            lists, dictionaries and sequences of modules are gathered one by one.
        shards: ranks over which parameters are cut.
        replicas: ranks that keep the same rows.
        reduce_dtype: in which gradients travel; default float32 or wider.
        each: gradients travel after each microbatch; else after the last.
        defer: weight gradients come apart from the backward pass, and are reduced once after it.

    Raises:
        ValueError: parameters of several dtypes; ``defer`` where this torch has no way to do it.
    """

    def __init__(
        self,
        module: nn.Module,
        shards: Axis,
        replicas: Axis,
        reduce_dtype: torch.dtype | None,
        each: bool,
        defer: bool = False,
    ):
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if defer and not fsdp_can_defer():
            raise ValueError(
                "zero=3 under a schedule that splits the backward pass needs parts of FSDP2 that this torch does not "
                "have; use zero=2, or a schedule of whole backward passes (1f1b)"
            )
        self.shards, self.replicas, self.each = shards, replicas, each
        self.everywhere = [axis for axis in (shards, replicas) if axis.size > 1]
        self.roots = roots_of(module)
        ignored = not_for_fsdp(self.roots.values())
        mine = [item for root in self.roots.values() for item in root.parameters() if item not in ignored]
        narrow = _narrow_dtype(mine)
        self.wide = reduce_dtype or (wide_dtype(mine[0].dtype) if mine else torch.float32)
        for item in mine:
            item.data = item.data.to(wide_dtype(item.dtype)).contiguous()
        policy = MixedPrecisionPolicy(narrow, self.wide, cast_forward_inputs=False)
        mesh = _mesh(shards, replicas, mine[0].device.type if mine else "cpu")
        self.wrapped: list[Any] = []
        for root in self.roots.values():
            self.wrapped += wrap(root, mesh, policy, ignored)
        self._known = {p.sharded_param: p for wrapped in self.wrapped for p in fsdp_parameters(wrapped)}
        for item in self._known:
            item.shards = shards
        self._gathered: dict[nn.Parameter, Any] = {}
        self._arrived: set[nn.Parameter] = set()
        self._deferring = False
        self._listen()

    def _listen(self) -> None:
        """Gradients of the gathered parameters are seen here, and what is deferred comes in by the door."""
        for wrapped in self.wrapped:
            wrapped.unshard()
            for parameter in fsdp_parameters(wrapped):
                if parameter.unsharded_param.requires_grad:
                    gathered = parameter.unsharded_param
                    self._gathered[gathered] = parameter
                    gathered.register_post_accumulate_grad_hook(weakly(self._see))
                    gathered.gradient_door = weakly(self._accumulate)
            wrapped.reshard()
        for root in self.roots.values():
            if root in self.wrapped:
                root.register_forward_hook(self._after_forward)

    def _after_forward(self, root: Any, *_: Any) -> None:
        # FSDP2 keeps a root gathered for its backward pass. Without one, what the module shows as its parameters would
        # be those copies, and stay so when the parameters are written.
        if not torch.is_grad_enabled():
            root.reshard()

    def _see(self, gathered: nn.Parameter) -> None:
        if gathered.grad is not None:
            self._arrived.add(self._gathered[gathered].sharded_param)

    def _accumulate(self, gathered: nn.Parameter, gradient: Tensor) -> None:
        known = self._gathered[gathered]
        self._arrived.add(known.sharded_param)
        fsdp_add_gradient(known, gradient, self.wide)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is cut here."""
        return parameter in self._known

    # ---------------------------------------------------------------- a step
    def last_microbatch(self, last: bool, key: Hashable = None) -> None:
        """Whether the passes that follow, of one root or of all, are those of the last microbatch."""
        if self._deferring:
            return
        for root in [self.roots[key]] if key in self.roots and key is not None else list(self.roots.values()):
            wrapped: Any = root
            if not self.each:
                wrapped.set_requires_gradient_sync(last)
            elif self.replicas.size > 1:
                wrapped.set_requires_all_reduce(last)

    @contextmanager
    def deferred_step(self) -> Iterator[None]:
        """Parameters stay gathered while gradients come in any order; then all of them are reduced at once."""
        self._deferring = True
        for wrapped in self.wrapped:
            wrapped.set_requires_gradient_sync(False, recurse=False)
            wrapped.set_reshard_after_forward(False, recurse=False)
            wrapped.set_reshard_after_backward(False, recurse=False)
            wrapped.unshard()
        try:
            yield
        finally:
            self._deferring = False
            for wrapped in self.wrapped:
                wrapped.set_requires_gradient_sync(True, recurse=False)
                wrapped.set_reshard_after_forward(True, recurse=False)
                wrapped.set_reshard_after_backward(True, recurse=False)
        for root in self.roots.values():
            fsdp_reduce(root)

    def reshard(self) -> None:
        """The modules' parameters are those that are kept, whatever a forward pass has left gathered."""
        for wrapped in self.wrapped:
            wrapped.reshard()

    def finish(self) -> None:
        """After the last microbatch: which parameters have no gradient on any rank."""
        self.reshard()
        trained = [parameter for parameter in self._known if parameter.requires_grad]
        if not trained:
            return
        flags = torch.tensor([parameter in self._arrived for parameter in trained], dtype=torch.int32)
        flags = flags.to(trained[0].device)
        for axis in self.everywhere:
            all_reduce(flags, axis, "max")
        self._arrived = set()
        for parameter, here in zip(trained, flags.tolist(), strict=True):
            if not here:
                parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's range of a gradient, one-dimensional; None where there is none on any rank."""
        return None if parameter.grad is None else local_part(parameter.grad)

    def present(self, parameter: nn.Parameter) -> Tensor:
        """A gradient that others wait to sum: zeros where there is none."""
        if parameter.grad is None:
            parameter.grad = _zeros_like(parameter)
        return local_part(parameter.grad)


def local_part(tensor: Any) -> Tensor:
    """This rank's rows of a tensor that FSDP2 has cut, flattened: a view."""
    # Nothing else is asked of it as a DTensor: operations on those remember meshes whose process groups have ended.
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local.detach().view(-1)


def cuts_of(parameter: Any) -> tuple[Range, ...]:
    """Of every rank, the range of the flattened parameter that it keeps: torch.chunk's rows of its first dimension."""
    rows, ranks = parameter.shape[0], shards_of(parameter).size
    stride = parameter.numel() // rows if rows else 0
    each = -(-rows // ranks)
    edges = [min(rank * each, rows) * stride for rank in range(ranks + 1)]
    return tuple(pairwise(edges))


def shards_of(parameter: Any) -> Axis:
    """The ranks over which FSDP2 has cut a parameter: as we noted it, since a DTensor may carry the mesh of a process
    group of the same ranks that has ended."""
    shards: Axis = parameter.shards
    return shards


def is_cut(parameter: Any) -> bool:
    """Whether a parameter is one that FSDP2 has cut."""
    return hasattr(parameter, "shards")


def whole_rows(parameter: nn.Parameter, of: str = "parameters") -> Tensor:
    """A parameter, or its gradient, put together where FSDP2 has cut it: every rank that holds a part calls this."""
    tensor = parameter.grad if of == "gradients" else parameter
    assert tensor is not None
    if not is_cut(parameter):
        return tensor.detach()
    piece = Piece(Sharding.whole(tuple(parameter.shape)), cuts=cuts_of(parameter), shards=shards_of(parameter))
    return piece.gather(local_part(tensor))


def _zeros_like(parameter: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        torch.zeros_like(parameter.to_local().detach()),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _narrow_dtype(parameters: list[nn.Parameter]) -> torch.dtype | None:
    dtypes = {item.dtype for item in parameters}
    if len(dtypes) > 1:
        shown = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"zero=3 takes parameters of one dtype, and these are {shown}; convert them, or use zero=2")
    return next((dtype for dtype in dtypes if wide_dtype(dtype) != dtype), None)


def _mesh(shards: Axis, replicas: Axis, device_type: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if replicas.size == 1:
        assert shards.group is not None
        return DeviceMesh.from_group(shards.group, device_type, mesh_dim_names=("shard",))
    # Row: ranks that keep the whole together. The groups are those that exist: only this rank's row and column count.
    mesh = torch.full((replicas.size, shards.size), -1, dtype=torch.int64)
    for replica in range(replicas.size):
        step = replicas.ranks[replica] - replicas.ranks[replicas.rank]
        mesh[replica] = torch.tensor([rank + step for rank in shards.ranks])
    assert shards.group is not None and replicas.group is not None
    groups = [replicas.group, shards.group]
    return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=("replicate", "shard"))
