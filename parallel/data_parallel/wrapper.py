"""Data parallelism: the same module on every rank of an axis, gradients summed over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gridtron.core.communication import broadcast_from_first
from gridtron.core.grid import Axis
from gridtron.core.precision import wide_dtype
from gridtron.parallel.data_parallel.buckets import make_buckets
from gridtron.parallel.parameters import NamedParameter, named_parameters, sum_among_holders


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
        shard_size: of hybrid sharding; goes with zero above 0, which is not built.

    Raises:
        ValueError: zero above 0 or a shard_size.

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
    ):
        super().__init__()
        if zero != 0 or shard_size is not None:
            raise ValueError(f"zero={zero}, shard_size={shard_size}: only zero=0 without shard_size is built")
        self.module = module
        self.axis = Axis.of(axis)
        self.reduce_dtype = reduce_dtype
        self._named = named_parameters(module)
        tensors = [item.parameter.detach() for item in self._named] + [*module.buffers()]
        broadcast_from_first(tensors, self.axis)
        # A gradient that no other rank has a part in, already wide, needs no door: autograd's own .grad accumulates it.
        guarded = [item.parameter for item in self._named if item.parameter.requires_grad and self._travels(item)]
        self._buckets = make_buckets(guarded, bucket_bytes)
        self._place = {p: (bucket, i) for bucket in self._buckets for i, p in enumerate(bucket.parameters)}
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            parameter.gradient_door = self.accumulate_gradient  # type: ignore[attr-defined]
        self._reducing = True
        self._finished = False
        self._had_gradients = False
        self._launched = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _travels(self, item: NamedParameter) -> bool:
        summed = item.axis.size > 1 and (item.sharding.partial or bool(item.sharding.shared()))
        return self.axis.size > 1 or summed or item.parameter.dtype != wide_dtype(item.parameter.dtype)

    # ---------------------------------------------------------------- the door
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        bucket, index = self._place[parameter]
        if gradient.data_ptr() == bucket.views[index].data_ptr() and gradient.numel():
            raise RuntimeError(
                "a backward pass met the gradients of the last step: call optimizer.zero_grad() after optimizer.step()"
            )
        parameter.grad = None
        self.accumulate_gradient(parameter, gradient)

    def accumulate_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Takes a finished gradient of one microbatch.

        Raises:
            RuntimeError: the parameter's bucket was reduced already.
        """
        if self._finished:
            self._clear()
        bucket, index = self._place[parameter]
        if bucket.pending is not None:
            name = next(item.name for item in self._named if item.parameter is parameter)
            raise RuntimeError(
                f"a gradient of {name} came after its bucket was reduced: run every microbatch but the last under "
                "no_reduce(), and finish_step() after the last"
            )
        bucket.add(index, gradient, self._reducing)
        if self._reducing:
            self._launch_complete()

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
            for parameter, view, arrived in zip(bucket.parameters, bucket.views, bucket.arrived, strict=True):
                parameter.grad = view if arrived and view.dtype == parameter.dtype else None
        self._launched = len(self._buckets)
        held = [(self.gradient(item.parameter), item.sharding, item.axis) for item in self._named]
        sum_among_holders([(gradient, sharding, axis) for gradient, sharding, axis in held if gradient is not None])
        self._finished = True
        self._had_gradients = any(parameter.grad is not None for parameter in self._place)

    def _begun_anew(self) -> bool:
        """Whether optimizer.zero_grad() forgot the finished step: then a rank without any backward still takes part."""
        visible = [parameter for parameter in self._place if parameter.dtype == wide_dtype(parameter.dtype)]
        return bool(visible) and all(parameter.grad is None for parameter in visible) and self._had_gradients

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """A parameter's gradient in the wide dtype, this rank's rows; None where there is none on any rank."""
        if parameter not in self._place:
            return parameter.grad
        bucket, index = self._place[parameter]
        return bucket.views[index] if bucket.arrived[index] else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients."""
        super().zero_grad(set_to_none)
        self._clear()

    def _clear(self) -> None:
        for bucket in self._buckets:
            bucket.clear()
        self._launched = 0
        self._finished = False


def accumulate_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """The one door for a finished gradient: to the DataParallel that holds ``parameter``, else into ``.grad``."""
    door = getattr(parameter, "gradient_door", None)
    if door is not None:
        door(parameter, gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
