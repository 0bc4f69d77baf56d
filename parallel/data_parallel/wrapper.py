"""Data parallelism: the same module on every rank of an axis, gradients summed over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gridtron.core.communication import broadcast_from_first
from gridtron.core.grid import Axis
from gridtron.core.precision import wide_dtype
from gridtron.parallel.data_parallel.buckets import make_buckets
from gridtron.parallel.parameters import NamedParameter, named_parameters, sum_among_copies, sum_among_holders


class DataParallel(nn.Module):
    """Sums gradients over ``axis`` behind the backward pass, and over the holders of shared parameters.

    The sum is plain: divide the loss by the global count of what it averages over. All microbatches but the last run
    under :meth:`no_reduce`; :meth:`finish_step` waits, after which ``parameter.grad`` is what an optimizer should take.

    Every gradient comes through one door, :meth:`accumulate_gradient`: autograd's hook calls it, and so may code that
    finishes a gradient later than autograd does.

    Args:
        module: the same on every rank; parameters and buffers are broadcast from the axis's first rank.
        axis: Axis, one-dimensional DeviceMesh, ProcessGroup, or None (one rank: the holders' sums remain).
        zero: only 0 is built: all states on every rank.
        bucket_bytes: size of a bucket in bytes.
        reduce_dtype: dtype in which gradients travel; default that in which they accumulate, float32 or wider.
        set_grad: finish_step() sets ``parameter.grad``, in the parameter's dtype; False where :meth:`gradient` is read
            instead, which saves a copy of gradients that accumulate wider than their parameters.
        shard_size: of hybrid sharding; goes with zero above 0, which is not built.

    Raises:
        ValueError: zero above 0, a shard_size, or bucket_bytes under 1.

    Example:
        >>> model = DataParallel(module, grid.data)
        >>> for batch in microbatches[:-1]:
        ...     with model.no_reduce():
        ...         (loss(model(batch)) / count).backward()
        >>> (loss(model(microbatches[-1])) / count).backward()
        >>> model.finish_step()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    leaves_no_trace = True

    def __init__(
        self,
        module: nn.Module,
        axis: Any = None,
        zero: int = 0,
        bucket_bytes: int = 25 * 1024 * 1024,
        reduce_dtype: torch.dtype | None = None,
        shard_size: int | None = None,
        *,
        set_grad: bool = True,
    ):
        super().__init__()
        if zero != 0 or shard_size is not None:
            raise ValueError(f"zero={zero}, shard_size={shard_size}: only zero=0 without shard_size is built")
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket holds at least 1 byte")
        self.module = module
        self.axis = Axis.of(axis)
        self.reduce_dtype = reduce_dtype
        self._named = named_parameters(module)
        tensors = [item.parameter.detach() for item in self._named] + [*module.buffers()]
        broadcast_from_first(tensors, self.axis)
        self._copied = [(i, i.copies) for i in self._named if i.copies is not None and i.parameter.requires_grad]
        self._summed = [i for i in self._named if i.axis.size > 1 and (i.sharding.partial or i.sharding.shared())]
        # A gradient that no other rank has a part in, already wide, needs no door: autograd's own .grad accumulates it.
        guarded = [item.parameter for item in self._named if item.parameter.requires_grad and self._travels(item)]
        self._buckets = make_buckets(guarded, bucket_bytes)
        self._frozen = [item for item in self._named if not item.parameter.requires_grad and self._travels(item)]
        self._place = {p: (bucket, i) for bucket in self._buckets for i, p in enumerate(bucket.parameters)}
        for parameter in self._place:
            parameter.register_hook(self._before_gradient)
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            parameter.gradient_door = self.accumulate_gradient  # type: ignore[attr-defined]
        self._reducing = True
        self._set_grad = set_grad
        self._finished = False
        self._had_gradients = False
        self._launched = 0
        self._kept: dict[nn.Parameter, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for item in self._frozen:
            if item.parameter.requires_grad:
                raise RuntimeError(
                    f"{item.name} was frozen when DataParallel was made and is trained now: its gradient would not be "
                    "summed; unfreeze it first and wrap the module then"
                )
        return self.module(*args, **kwargs)

    def _travels(self, item: NamedParameter) -> bool:
        wide = item.parameter.dtype == wide_dtype(item.parameter.dtype)
        return self.axis.size > 1 or item in self._summed or item.copies is not None or not wide

    # ---------------------------------------------------------------- the door
    def _before_gradient(self, gradient: Tensor) -> None:
        # Before autograd accumulates: a .grad that is left from the last step is the same on every rank, and must not
        # be summed over them again with what is new.
        if self._finished:
            self._begin_step()

    def _begin_step(self) -> None:
        """Gradients that the last step left, zero or not, will be added to the sums of this one, as autograd would."""
        for parameter in self._place:
            if parameter.grad is not None:
                self._kept[parameter] = parameter.grad.clone()
                parameter.grad = None
        self._clear()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:  # it is deferred: the layer gave autograd none, and calls the door later
            return
        parameter.grad = None
        self.accumulate_gradient(parameter, gradient)

    def accumulate_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Takes a finished gradient of one microbatch.

        Raises:
            RuntimeError: the parameter's bucket was reduced already, or holds narrower numbers than the gradient.
        """
        if self._finished:
            self._begin_step()
        bucket, index = self._place[parameter]
        if torch.promote_types(gradient.dtype, bucket.flat.dtype) != bucket.flat.dtype:
            raise RuntimeError(
                f"{self._name_of(parameter)} became {parameter.dtype} after DataParallel was made, and gradients would "
                f"accumulate in {bucket.flat.dtype}; convert the module first and wrap it then"
            )
        if bucket.pending is not None:
            raise RuntimeError(
                f"a gradient of {self._name_of(parameter)} came after its bucket was reduced: run every microbatch but "
                "the last under no_reduce(), and finish_step() after the last"
            )
        bucket.add(index, gradient, self._reducing)
        if self._reducing:
            self._launch_complete()

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(item.name for item in self._named if item.parameter is parameter)

    def _launch_complete(self) -> None:
        # In order of the buckets, whatever finishes first: collectives must start in one order on every rank.
        while self._launched < len(self._buckets) and self._buckets[self._launched].complete:
            self._buckets[self._launched].start_reduction(self.axis, self.reduce_dtype)
            self._launched += 1

    @contextmanager
    def no_reduce(self) -> Iterator[None]:
        """Gradients of backward passes inside accumulate on this rank and do not travel yet."""
        before, self._reducing = self._reducing, False
        try:
            yield
        finally:
            self._reducing = before

    def finish_step(self) -> None:
        """Waits until every gradient is the sum over the axis and over its holders; a second call does nothing."""
        if not self._buckets or (self._finished and not self._begun_anew()):
            return
        if self._finished:
            self._clear()
        for bucket in self._buckets[self._launched :]:
            bucket.start_reduction(self.axis, self.reduce_dtype)
        for bucket in self._buckets:
            bucket.finish_reduction()
        self._launched = len(self._buckets)
        held = [(self.gradient(item.parameter), item.sharding, item.axis) for item in self._summed]
        sum_among_holders([(gradient, sharding, axis) for gradient, sharding, axis in held if gradient is not None])
        sum_among_copies([(self._present(item.parameter), copies) for item, copies in self._copied])
        for parameter, kept in self._kept.items():
            bucket, index = self._place[parameter]
            bucket.keep(index, kept)
        self._kept = {}
        for parameter in self._place if self._set_grad else ():
            gradient = self.gradient(parameter)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        self._finished = True
        self._had_gradients = any(parameter.grad is not None for parameter in self._place)

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """All gradients of ``parameters`` came under :meth:`no_reduce` and no more will: their buckets may travel."""
        for parameter in parameters:
            if parameter in self._place:
                bucket, index = self._place[parameter]
                bucket.landed.add(index)
        self._launch_complete()

    def _present(self, parameter: nn.Parameter) -> Tensor:
        """A gradient that others wait to sum: zeros where this rank has none."""
        bucket, index = self._place[parameter]
        if not bucket.arrived[index]:
            bucket.keep(index, torch.zeros_like(bucket.views[index]))
        return bucket.views[index]

    def _begun_anew(self) -> bool:
        """Whether optimizer.zero_grad() forgot the finished step: then a rank without any backward still takes part."""
        return self._had_gradients and all(parameter.grad is None for parameter in self._place)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """A parameter's gradient in the wide dtype, this rank's rows; None where there is none on any rank."""
        if parameter not in self._place:
            return parameter.grad
        bucket, index = self._place[parameter]
        return bucket.views[index] if bucket.arrived[index] else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients."""
        super().zero_grad(set_to_none)
        self._kept = {}
        if set_to_none:
            self._clear()

    def _clear(self) -> None:
        for bucket in self._buckets:
            bucket.clear()
        self._launched = 0
        self._finished = False
