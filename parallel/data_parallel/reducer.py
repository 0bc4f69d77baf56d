"""When buckets travel: behind the backward pass, in one order on every rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gridtron.core.communication import all_reduce
from gridtron.core.grid import Axis
from gridtron.parallel.data_parallel.buckets import Bucket, Reduction, make_buckets
from gridtron.parallel.parameters import NamedParameter


class Unit:
    """Buckets whose gradients are complete together: those of one stage, or of the whole model.

    Collectives must start in one order on every rank: within a unit in the order of its buckets, whatever finishes
    first, and units in the order in which the program ends them.
    """

    def __init__(self, buckets: Sequence[Bucket]):
        self.buckets = list(buckets)
        self.launched = 0

    def launch_complete(self) -> None:
        """Starts the buckets that are complete, in order."""
        while self.launched < len(self.buckets) and self.buckets[self.launched].complete:
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self.launched]
        if bucket.reduction.release and self.launched:
            # Memory for two whole buckets at most: one that travels, one that fills.
            self.buckets[self.launched - 1].finish()
        bucket.start()
        self.launched += 1

    def flush(self) -> None:
        """Ends a reduction: what has not travelled does so now."""
        while self.launched < len(self.buckets):
            self._launch()
        for bucket in self.buckets:
            bucket.finish()
        self.launched = 0

    def clear(self) -> None:
        self.launched = 0
        for bucket in self.buckets:
            bucket.clear()


def by_unit(
    parameters: Sequence[nn.Parameter], units: Mapping[Any, Iterable[nn.Parameter]]
) -> dict[Hashable, list[nn.Parameter]]:
    """Parameters by unit; those that no unit has wait, under None, for the end of the step."""
    known = {parameter: key for key, held in units.items() for parameter in held}
    found: dict[Hashable, list[nn.Parameter]] = {key: [] for key in units}
    for parameter in parameters:
        found.setdefault(known.get(parameter), []).append(parameter)
    return {key: held for key, held in found.items() if held}


def cut_alike(
    summed: Sequence[NamedParameter], copied: Sequence[tuple[NamedParameter, Axis]]
) -> dict[nn.Parameter, Hashable]:
    """Parameters whose shares are summed with those of other tensor ranks or stages, where they must be cut in the same
    way: with which others each may share a bucket."""
    partial = {item.parameter: "partial" for item in summed if item.sharding.dim is None}
    return {**partial, **{item.parameter: item.name for item, _ in copied}}


class Reducer:
    """Gradients of parameters in buckets: taken one by one, reduced, kept.

    Args:
        units: key -> parameters whose gradients are complete together.
        apart: see :func:`make_buckets`.
        bucket_bytes: see :func:`make_buckets`.
        reduction: over which ranks, and when.
        everywhere: all ranks that together have the gradients of a step.
    """

    def __init__(
        self,
        units: Mapping[Hashable, Sequence[nn.Parameter]],
        apart: Mapping[nn.Parameter, Hashable],
        bucket_bytes: int,
        reduction: Reduction,
        everywhere: Axis,
    ):
        self.reduction, self.everywhere = reduction, everywhere
        self.units = {key: Unit(make_buckets(held, apart, bucket_bytes, reduction)) for key, held in units.items()}
        self.buckets = [bucket for unit in self.units.values() for bucket in unit.buckets]
        self.place: dict[nn.Parameter, tuple[Bucket, int, Unit]] = {
            parameter: (bucket, index, unit)
            for unit in self.units.values()
            for bucket in unit.buckets
            for index, parameter in enumerate(bucket.parameters)
        }

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.place

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor, landed: bool) -> None:
        """Takes a gradient; ``landed``: it is the last of this parameter before its reduction."""
        bucket, index, unit = self.place[parameter]
        bucket.add(index, gradient.to_dense() if gradient.layout != torch.strided else gradient)
        if landed:
            bucket.landed.add(index)
            unit.launch_complete()

    def travels(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's bucket has left, so that nothing can be added to it."""
        return self.place[parameter][0].pending is not None

    def complete(self, key: Hashable) -> None:
        """All gradients of a unit have come and no more will before their reduction."""
        unit = self.units.get(key)
        if unit is not None:
            for bucket in unit.buckets[unit.launched :]:
                bucket.landed.update(range(len(bucket.parameters)))
            unit.launch_complete()

    def flush(self, key: Hashable) -> None:
        """Reduces what a unit has gathered since its last reduction."""
        if key in self.units:
            self.units[key].flush()

    def flush_all(self) -> None:
        """Reduces what all units have gathered."""
        for unit in self.units.values():
            unit.flush()

    def any_rank(self, more: bool) -> Tensor:
        """Whether any rank has more microbatches, as a tensor: who has more itself need not wait to read it."""
        told = torch.tensor([more], dtype=torch.int32, device=self.buckets[0].device if self.buckets else None)
        return all_reduce(told, self.everywhere, "max")

    def under_way(self) -> bool:
        """Whether anything travels, or came to travel."""
        return any(bucket.pending is not None or bucket.landed for bucket in self.buckets)

    def check_memory(self, name_of: Callable[[nn.Parameter], str]) -> None:
        """Whether every parameter is still a view of its bucket's flat weights.

        Raises:
            RuntimeError: one that is not.
        """
        for bucket in self.buckets:
            if bucket.weights is None:
                continue
            begin, size = bucket.weights.data_ptr(), bucket.weights.element_size()
            for parameter, (first, last) in zip(bucket.parameters, bucket.slots, strict=True):
                if parameter.data_ptr() != begin + first * size and first < last:
                    raise RuntimeError(
                        f"the memory of {name_of(parameter)} was replaced after DataParallel was made (by a "
                        "conversion, .data =, or load_state_dict(assign=True)), and its ranges would be updated "
                        "elsewhere; do that first and wrap then, or copy into the parameter"
                    )

    def finish(self) -> None:
        """After the last reduction: every rank learns which parameters have a gradient on any."""
        for bucket in self.buckets:
            bucket.sum_replicas()
        if not self.reduction.cut or not self.buckets:
            return
        flags = torch.tensor([here for bucket in self.buckets for here in bucket.reduced], dtype=torch.int32)
        present = iter(all_reduce(flags.to(self.buckets[0].device), self.everywhere, "max").tolist())
        for bucket in self.buckets:
            bucket.reduced = [bool(next(present)) for _ in bucket.parameters]

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """What this rank keeps of a parameter's gradient; None where there is none on any rank."""
        bucket, index, _ = self.place[parameter]
        return bucket.gradient(index) if bucket.reduced[index] else None

    def present(self, parameter: nn.Parameter) -> Tensor:
        """A gradient that others wait to sum: zeros where there is none."""
        bucket, index, _ = self.place[parameter]
        if not bucket.reduced[index]:
            bucket.add_reduced(index, torch.zeros((), dtype=bucket.dtype, device=bucket.device))
        return bucket.gradient(index)

    def gather_parameters(self) -> None:
        """Every rank's range of the parameters, after each has updated its own."""
        pending: list[Any] = [bucket.start_gather() for bucket in self.buckets if bucket.weights is not None]
        for item in pending:
            item.wait()

    def clear(self) -> None:
        for unit in self.units.values():
            unit.clear()
