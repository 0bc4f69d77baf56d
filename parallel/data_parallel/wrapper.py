"""Data parallelism: the same module on every rank of an axis, gradients summed over it, states whole or cut by ZeRO."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gridtron.core.communication import broadcast_from_first
from gridtron.core.grid import Axis
from gridtron.core.pieces import Piece
from gridtron.core.precision import wide_dtype
from gridtron.core.torch_compat import tree_leaves
from gridtron.parallel.data_parallel.buckets import Reduction, cut_axis
from gridtron.parallel.data_parallel.config import check_arguments, reduces_each
from gridtron.parallel.data_parallel.fsdp import FullyShard, cuts_of, local_part
from gridtron.parallel.data_parallel.reducer import Reducer, by_unit, cut_alike
from gridtron.parallel.gradient_door import add_to_grad, weakly
from gridtron.parallel.parameters import NamedParameter, named_parameters, sum_among_copies, sum_among_pieces


class DataParallel(nn.Module):
    """Sums gradients over ``axis`` behind the backward pass, and over the holders of shared parameters.

    The sum is plain: divide the loss by the global count of what it averages over. All microbatches but the last run
    under :meth:`no_reduce`; :meth:`finish_step` waits, after which ``.grad`` of :meth:`optimizer_parameters` is what an
    optimizer should take. With ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) those are this rank's ranges of the
    parameters, and the next forward pass fetches what the other ranks made of theirs.

    Every gradient comes through one door, :meth:`accumulate_gradient`: autograd's hook calls it, and so may code that
    finishes a gradient later. Clip by :func:`gridtron.parallel.clip_gradients`: a rank may hold only its ranges.

    Args:
        module: the same on every rank; parameters and buffers are broadcast from the axis's first rank.
        axis: Axis, one-dimensional DeviceMesh, ProcessGroup, or None (one rank: the holders' sums remain).
        zero: 0: all states on every rank; 1: the optimizer's are cut over the ranks; 2: gradients too, which are
            reduced after each microbatch; 3: parameters too, by torch's FSDP2, which gathers the items of lists and
            sequences of modules one by one, so that every rank calls the same ones.
        bucket_bytes: size of a bucket in bytes.
        reduce_dtype: dtype in which gradients travel; default that in which they accumulate, float32 or wider.
        shard_size: with zero above 0: states are cut over groups of so many neighbours, and whole over all groups
            (hybrid sharding); default: over all ranks.
        set_grad: finish_step() sets ``.grad``, in the parameter's dtype; False where :meth:`gradient` is read instead,
            which saves a copy of gradients that accumulate wider than their parameters.
        reduce: "each" microbatch or "last"; default: each from zero=2 on.
        units: key -> parameters whose gradients are complete together (:meth:`unit_pass`): stages of a pipeline.
        defer: weight gradients come apart from the backward pass, and are reduced once after it.
        agreed: all ranks are known to have as many microbatches; else those with fewer wait along, for a small message
            a microbatch where each is reduced by itself (under zero=3 all must have as many).

    Raises:
        ValueError: a module that is wrapped already, an unknown zero or reduce, a shard_size that does not divide the
            axis or without zero, or bucket_bytes under 1.

    Example:
        >>> model = DataParallel(module, grid.data, zero=2)
        >>> optimizer = torch.optim.AdamW(model.optimizer_parameters())
        >>> for batch in microbatches[:-1]:
        ...     with model.no_reduce():
        ...         (loss(model(batch)) / count).backward()
        >>> (loss(model(microbatches[-1])) / count).backward()
        >>> model.finish_step()
        >>> optimizer.step()
        >>> model.zero_grad()
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
        reduce: str | None = None,
        units: Mapping[Any, Iterable[nn.Parameter]] | None = None,
        defer: bool = False,
        agreed: bool = False,
    ):
        super().__init__()
        if isinstance(module, DataParallel):
            raise ValueError("the module is in a DataParallel already; give that one's module")
        check_arguments(zero, bucket_bytes, shard_size)
        self.module = module
        self.axis = Axis.of(axis)
        self.zero = zero
        self.shards, self.replicas = cut_axis(self.axis, zero, shard_size)
        # Over one rank nothing travels and nothing is cut: a second buffer for what is reduced would be of no use.
        self.each = reduces_each(zero if self._cuts else 0, reduce) and self.axis.size > 1
        self._set_grad = set_grad
        broadcast_from_first([*(p.detach() for p in module.parameters()), *module.buffers()], self.axis)
        self._fully: FullyShard | None = None
        if zero == 3 and self.shards.size > 1:
            self._fully = FullyShard(module, self.shards, self.replicas, reduce_dtype, self.each, defer)
        self.named = named_parameters(module)
        self._copied = [(i, i.copies) for i in self.named if i.copies is not None and i.parameter.requires_grad]
        self._summed = [
            i
            for i in self.named
            if i.axis.size > 1 and i.parameter.requires_grad and (i.sharding.partial or i.sharding.shared())
        ]
        self._frozen = [i for i in self.named if not i.parameter.requires_grad and (self._cuts or self._travels(i))]
        release = zero >= 2 and self._cuts
        reduction = Reduction(self.shards, self.replicas, self.each, release, reduce_dtype)
        trained = [item for item in self.named if item.parameter.requires_grad]
        guarded = [item.parameter for item in trained if self._travels(item)]
        apart = cut_alike(self._summed, self._copied) if self._cuts else {}
        self._reducer = Reducer(by_unit(guarded, units or {}), apart, bucket_bytes, reduction, self.axis)
        self._parts = {item.parameter: self._part_of(item.parameter) for item in trained}
        # Whose gradients this wrapper sums; of others .grad is autograd's own.
        self._guarded = [p for p in self._parts if p in self._reducer or self._is_gathered(p)]
        self._summed_pieces = [(item.parameter, self.piece(item)) for item in self._summed]
        self._rounds = self.each and not agreed and self._fully is None
        self._reducing = True
        self._finished = self._had_gradients = self._zeroed = self._stale = self._gathered = False
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._listen()

    def _listen(self) -> None:
        for parameter in self._reducer.place:
            parameter.register_hook(weakly(self._before_gradient))
            parameter.register_post_accumulate_grad_hook(weakly(self._on_gradient))
            parameter.gradient_door = weakly(self.accumulate_gradient, add_to_grad)  # type: ignore[attr-defined]
        if self._fully is None and self._cuts:
            # Not in forward alone: the module may be called by itself.
            self.module.register_forward_pre_hook(weakly(self._before_module))

    # ---------------------------------------------------------------- what lies where
    @property
    def _cuts(self) -> bool:
        return self.shards.size > 1

    def _is_gathered(self, parameter: nn.Parameter) -> bool:
        return self._fully is not None and self._fully.holds(parameter)

    def _travels(self, item: NamedParameter) -> bool:
        # A gradient that no other rank has a part in, already wide, needs no door: autograd's own .grad takes it.
        if self._is_gathered(item.parameter):
            return False
        wide = item.parameter.dtype == wide_dtype(item.parameter.dtype)
        return self.axis.size > 1 or item in self._summed or item.copies is not None or not wide

    def cuts(self, parameter: nn.Parameter) -> tuple[tuple[int, int], ...] | None:
        """Of every rank of ``shards``, the range of the flattened parameter that it updates; None: all of it."""
        if self._is_gathered(parameter):
            return cuts_of(parameter)
        if self._cuts and parameter in self._reducer:
            bucket, index, _ = self._reducer.place[parameter]
            return bucket.cuts(index)
        return None

    def piece(self, item: NamedParameter) -> Piece:
        """Where the part of a parameter that this rank updates lies in the whole."""
        return Piece(item.sharding, item.axis, self.cuts(item.parameter), self.shards, item.matrix)

    def part(self, parameter: nn.Parameter) -> nn.Parameter:
        """What this rank updates of a trained parameter: itself, or its range, one-dimensional."""
        return self._parts[parameter]

    def _part_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if self._is_gathered(parameter):
            return nn.Parameter(local_part(parameter))
        cuts = self.cuts(parameter)
        if cuts is not None:
            start, stop = cuts[self.shards.rank]
            # Of the parameter itself, whose counter of writes it shares: loaded weights are noticed.
            return nn.Parameter(parameter.detach().view(-1)[start:stop])
        return parameter

    def optimizer_parameters(self) -> list[nn.Parameter]:
        """What an optimizer on this rank should take: the trained parameters, or this rank's ranges of them."""
        return list(self._parts.values())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for item in self._frozen:
            if item.parameter.requires_grad:
                raise RuntimeError(
                    f"{item.name} was frozen when DataParallel was made and is trained now: its gradient would not be "
                    "summed; unfreeze it first and wrap the module then"
                )
        if self._stale and self._fully is not None:
            self.gather_parameters()
        outputs = self.module(*args, **kwargs)
        if self._fully is not None:
            # Gathered parameters have no hooks of ours that run before all of FSDP2's.
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(weakly(self._before_gradient))
        return outputs

    def _before_module(self, module: nn.Module, arguments: Any) -> None:
        if self._stale:
            self.gather_parameters()
        self._reducer.check_memory(self._name_of)

    def gather_parameters(self, updated: bool = False) -> None:
        """Fetches the ranges that the other ranks updated; every rank calls it, at the latest in the next forward.

        ``updated``: the optimizer's step is over, so that the next forward need not look again.
        """
        # Until gradients are forgotten or new ones come, an optimizer may still be about to use them.
        self._stale = self._cuts and self._finished and not updated
        self._gathered = True
        self.reshard()
        if self._cuts:
            self._reducer.gather_parameters()

    def reshard(self) -> None:
        """Under zero=3 the module has again the parameters that this rank keeps, whatever a forward pass gathered."""
        if self._fully is not None:
            self._fully.reshard()

    # ---------------------------------------------------------------- the door
    def _before_gradient(self, gradient: Tensor) -> None:
        # Before autograd accumulates: a .grad left from the last step must not be summed over the ranks once more.
        if self._finished:
            self._begin_step()

    def _begin_step(self) -> None:
        """Gradients that the last step left, zero or not, will be added to the sums of this one, as autograd would."""
        for parameter in self._guarded:
            part = self._parts[parameter]
            if part.grad is not None:
                self._kept[parameter] = part.grad.clone()
                part.grad = None
            if part is not parameter:
                parameter.grad = None  # FSDP2 would add to it, though an optimizer has forgotten that of the part
        self._stale = self._stale and not self._gathered
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
        dtype = self._reducer.place[parameter][0].dtype
        if torch.promote_types(gradient.dtype, dtype) != dtype:
            raise RuntimeError(
                f"{self._name_of(parameter)} became {parameter.dtype} after DataParallel was made, and gradients would "
                f"accumulate in {dtype}; convert the module first and wrap it then"
            )
        if self._reducer.travels(parameter):
            raise RuntimeError(
                f"a gradient of {self._name_of(parameter)} came after its bucket was reduced: run every microbatch but "
                "the last under no_reduce(), and finish_step() after the last"
            )
        self._reducer.accumulate(parameter, gradient, self._reducing)

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(item.name for item in self.named if item.parameter is parameter)

    @contextmanager
    def no_reduce(self) -> Iterator[None]:
        """Around each microbatch but the last.

        Gradients of backward passes inside accumulate on this rank and do not travel; where each microbatch is reduced
        by itself (zero 2 and 3) they have travelled on leaving. Ranks may have different numbers of them, but under
        zero=3, where each pass fetches parameters.
        """
        before = self._reducing
        if self._fully is not None:
            self._fully.last_microbatch(False)
        self._reducing = self.each and self._reducing
        try:
            yield
        finally:
            self._reducing = before
            if self._fully is not None:
                self._fully.last_microbatch(True)
        if self.each and before:
            self._end_microbatch()

    def _end_microbatch(self) -> None:
        if self._stale and self._fully is None:  # without a forward pass, in which the other ranks fetched
            self.gather_parameters()
        if self._finished:
            self._begin_step()
        self._reducer.flush_all()
        if self._rounds:
            self._reducer.any_rank(True)

    @contextmanager
    def unit_pass(self, key: Hashable, last: bool, whole: bool) -> Iterator[None]:
        """Around a pass that makes gradients of one unit.

        Args:
            key: of the unit.
            last: no more gradients of it will come in this step.
            whole: the pass makes all gradients of a microbatch, so that they may travel while it still runs.
        """
        if self._finished:
            self._begin_step()
        before, self._reducing = self._reducing, whole and (last or self.each)
        if self._fully is not None:
            self._fully.last_microbatch(last, key)
        try:
            yield
        finally:
            self._reducing = before
        if last and not self.each:
            self._reducer.complete(key)

    def end_microbatch_of(self, key: Hashable) -> None:
        """All gradients of one microbatch of a unit have come: they travel now where each microbatch's do."""
        if self.each:
            self._reducer.flush(key)

    def deferred_step(self) -> AbstractContextManager[None]:
        """Around a step whose weight gradients come apart from the backward pass."""
        return nullcontext() if self._fully is None else self._fully.deferred_step()

    # ---------------------------------------------------------------- the end of a step
    def finish_step(self) -> None:
        """Waits until every gradient is the sum over the axis and over its holders; a second call does nothing."""
        if not self._parts or (self._finished and not self._begun_anew()):
            return
        if self._stale and self._fully is None:  # without a forward pass, in which the other ranks fetched
            self.gather_parameters()
        if self._finished:
            self._clear()
        self._reducer.flush_all()
        while self._rounds and bool(self._reducer.any_rank(False)):
            self._reducer.flush_all()
        self._reducer.finish()
        if self._fully is not None:
            self._fully.finish()
        held = [(self.gradient(parameter), piece) for parameter, piece in self._summed_pieces]
        sum_among_pieces([(gradient, piece) for gradient, piece in held if gradient is not None])
        sum_among_copies([(self._present(item.parameter), copies) for item, copies in self._copied])
        for parameter, kept in self._kept.items():
            self._present(parameter).add_(kept)
        self._kept = {}
        for parameter in self._guarded if self._set_grad else ():
            part, gradient = self._parts[parameter], self.gradient(parameter)
            part.grad = None if gradient is None else gradient.to(part.dtype)
        self._finished, self._zeroed = True, False
        self._stale, self._gathered = self._cuts, False
        self._had_gradients = any(self._parts[parameter].grad is not None for parameter in self._guarded)

    def _present(self, parameter: nn.Parameter) -> Tensor:
        """A gradient that others wait to sum: zeros where this rank has none."""
        holder = self._reducer if parameter in self._reducer else self._fully
        assert holder is not None
        return holder.present(parameter)

    def _begun_anew(self) -> bool:
        """Whether zero_grad() forgot the finished step: then a rank without any backward still takes part."""
        return self._zeroed or (
            self._had_gradients and all(self._parts[parameter].grad is None for parameter in self._guarded)
        )

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """A parameter's gradient in the wide dtype: of this rank's rows, or of its range of them, one-dimensional;
        None where there is none on any rank."""
        if parameter in self._reducer:
            return self._reducer.gradient(parameter)
        if self._fully is not None and self._fully.holds(parameter):
            return self._fully.gradient(parameter)
        return parameter.grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients.

        Raises:
            RuntimeError: gradients of a last microbatch are on their way, and nobody waited for them.
        """
        if self._reducer.under_way():
            raise RuntimeError(
                "zero_grad() before finish_step(): gradients are on their way, and no optimizer had them"
            )
        self.reshard()
        super().zero_grad(set_to_none)
        for part in self._parts.values():
            if part.grad is not None:
                part.grad = None if set_to_none else part.grad.detach().zero_()
        self._kept = {}
        self._zeroed = True
        if set_to_none:
            self._clear()

    def _clear(self) -> None:
        self._reducer.clear()
        self._finished = False
