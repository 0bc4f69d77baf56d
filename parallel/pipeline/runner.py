"""Runs a proven program on this rank's stages: one loop over instructions, a handler for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gridtron.core.communication import all_reduce, host_axis
from gridtron.core.grid import Axis
from gridtron.parallel.gradient_door import Deferral
from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.call import Call, Forward, Loss
from gridtron.parallel.pipeline.channel import Channel, Spec, greet, signature
from gridtron.parallel.pipeline.families.forward_only import forward_only
from gridtron.parallel.pipeline.lower import lower
from gridtron.parallel.pipeline.program import Program
from gridtron.parallel.pipeline.schedule import Schedule
from gridtron.parallel.pipeline.trace import Trace


class PipelineRunner:
    """Runs a schedule over one axis, with stages of any module.

    A stage is called with what the stage before gave (a tensor, or several as positional arguments), the first with a
    microbatch of ``inputs``. Gradients accumulate until they are zeroed, as after ``loss.backward()``.

    The shapes that a stage gives must follow from those of its inputs. Where a schedule splits the backward pass, hooks
    on parameters (``register_post_accumulate_grad_hook``) do not see the gradients that wait. With DataParallel run
    :meth:`step` under its ``no_reduce()`` and call its ``finish_step()`` afterwards.

    Args:
        stages: {stage: module} of this rank.
        schedule: a Schedule; proven here, with the program that it is lowered to.
        axis: the pipeline axis: Axis, one-dimensional DeviceMesh, ProcessGroup or None (one rank).
        loss: (output of the last stage, target) -> a loss, or several to be summed; None: the last stage gives them.
        forward: how a stage is called: ``forward(stage, module, tensors, microbatch)``; default ``module(*tensors)``.
        gradient_scope: a context around the passes that make gradients, from the action.
        trace: records when what ran here.

    Raises:
        ValueError: stages that are not those of this rank, an axis of another size, a schedule that cannot run.

    Example:
        >>> schedule = build_schedule("1f1b", ranks=grid.pipeline.size, microbatches=4)
        >>> runner = PipelineRunner({grid.pipeline.rank: stage}, schedule, grid.pipeline, loss=squared_error)
        >>> total = runner.step(inputs, targets, divisor=batch_size)
        >>> optimizer.step()
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        axis: Any = None,
        loss: Loss | None = None,
        *,
        forward: Forward | None = None,
        gradient_scope: Callable[[Action], AbstractContextManager[Any]] | None = None,
        trace: Trace | None = None,
    ):
        self.axis = Axis.of(axis)
        self.stages, self.schedule, self.loss = dict(stages), schedule, loss
        self._check_place()
        self.program = lower(schedule).validate()
        self.forward = forward or _call_module
        self.gradient_scope = gradient_scope or (lambda action: nullcontext())
        self.trace = trace
        self.deferral = Deferral()
        for module in self.stages.values():
            self.deferral.watch(module.parameters())
        self.device = self._find_device()
        self._host = host_axis(self.axis)
        self.channel = Channel(self.axis, self._host, self.device)
        self._evaluations: dict[int, Program] = {}
        if self.axis.size > 1:
            pairs = {(min(t.source, t.target), max(t.source, t.target)) for t in self.program.transfers}
            greet(self.axis, sorted(pairs), self.device)

    def _check_place(self) -> None:
        schedule, axis = self.schedule, self.axis
        if axis.size != schedule.ranks:
            raise ValueError(
                f"the schedule is for ranks={schedule.ranks} and the {axis.name} axis has {axis.size}; "
                f"build it with ranks={axis.size}"
            )
        expected = schedule.stages(axis.rank)
        if tuple(sorted(self.stages)) != expected:
            raise ValueError(
                f"stages={sorted(self.stages)} on rank {axis.rank} of the {axis.name} axis: the schedule "
                f"{schedule.name} places {list(expected)} there"
            )

    def _find_device(self) -> torch.device:
        for module in self.stages.values():
            for tensor in (*module.parameters(), *module.buffers()):
                return tensor.device
        backend = torch.distributed.get_backend(self.axis.group) if self.axis.size > 1 else "gloo"
        return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        return self.schedule.num_stages - 1 in self.stages

    def step(
        self, inputs: Sequence[Any] | None = None, targets: Sequence[Any] | None = None, divisor: Any = None
    ) -> Tensor:
        """Forward and backward of all microbatches.

        Args:
            inputs: one a microbatch: a tensor or a tuple of tensors; read on the first stage's rank, elsewhere ignored.
            targets: one a microbatch; read on the last stage's rank, elsewhere ignored.
            divisor: what the sum of the losses is divided by, before the backward pass; default 1.

        Returns:
            The sum of all losses over ``divisor``, a scalar in float64, on every rank.

        Raises:
            ValueError: on every rank: another number of microbatches than the schedule's.
        """
        count = self.schedule.microbatches
        *given, signatures = self._agree(inputs, targets, count, train=True)
        if any(number != count for number in given):
            other = f", or build the schedule with microbatches={given[0]}" if given[0] not in (0, count) else ""
            raise ValueError(
                f"{given[0]} inputs and {given[1]} targets for a schedule of microbatches={count}: give {count} of "
                f"each{other}"
            )
        return self._run(self.program, inputs, targets, divisor, signatures)

    @torch.no_grad()
    def evaluate(
        self, inputs: Sequence[Any] | None = None, targets: Sequence[Any] | None = None, divisor: Any = None
    ) -> Tensor:
        """The same total without a backward pass, for any number of microbatches; modules stay in their mode."""
        count, other, _ = self._agree(inputs, targets, 0, train=False)
        if count != other:
            raise ValueError(f"{count} inputs and {other} targets: give equally many")
        if count == 0:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        if count not in self._evaluations:
            schedule = forward_only(self.schedule.placement, count, self.schedule.ranks)
            self._evaluations[count] = lower(schedule).validate()
        _, _, signatures = self._agree(inputs, targets, count, train=False)
        return self._run(self._evaluations[count], inputs, targets, divisor, signatures)

    def _agree(
        self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None, count: int, train: bool
    ) -> tuple[int, int, list[int]]:
        """Numbers of inputs and targets and, of ``count`` microbatches, the signatures of the inputs: known to every
        rank from those that read them, by one reduction."""
        told = torch.zeros(3 + count, dtype=torch.int64)
        if self.is_first:
            told[0] = len(inputs or ())
            for number, item in enumerate((inputs or ())[:count] if self.axis.size > 1 else ()):
                told[3 + number] = signature((train, _specs_of(item)))
        if self.is_last:
            told[1] = -1 if targets is None and self.loss is None else len(targets or ())
        # What is trained may change between steps, and with it which tensors carry a gradient.
        trained = tuple(item.requires_grad for module in self.stages.values() for item in module.parameters())
        told[2] = signature((self.axis.rank, trained, torch.is_autocast_enabled(self.device.type))) >> 32
        first, last, state, *signatures = all_reduce(told, self._host).tolist()
        return first, first if last == -1 else last, [number ^ state for number in signatures]

    def _run(
        self,
        program: Program,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        divisor: Any,
        signatures: list[int],
    ) -> Tensor:
        self.channel.begin(signatures, program.transfers)
        train = not program.schedule.forward_only
        try:
            total = Call(self, program, inputs, targets, 1 if divisor is None else divisor, train).run()
        except BaseException:
            self.deferral.take()
            self.channel.abandon()
            raise
        self.channel.finish()
        return all_reduce(total, self.axis)


def _call_module(stage: int, module: nn.Module, tensors: Sequence[Tensor], microbatch: int) -> Any:
    return module(*tensors)


def _specs_of(value: Any) -> Any:
    """Shapes and dtypes in whatever a microbatch is."""
    if isinstance(value, Tensor):
        spec = Spec.of(value)
        return spec.shape, str(spec.dtype), spec.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(_specs_of(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((str(key), _specs_of(item)) for key, item in sorted(value.items()))
    return type(value).__name__
