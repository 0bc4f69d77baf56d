"""How an engine runs its microbatches: one after another on a whole model, or through the stages of a pipeline."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gridtron.core.data.batch import Batch
from gridtron.core.errors import JobError
from gridtron.core.grid import Axis
from gridtron.parallel.data_parallel.wrapper import DataParallel
from gridtron.parallel.dropout import SampleContext
from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.schedule import Schedule


class Microbatches(Protocol):
    """Runs microbatches on this data rank; the sums that it gives are the same on all ranks of a pipeline.

    ``uneven``: whether data ranks may have different numbers of them.
    """

    uneven: bool

    def train(self, batches: Sequence[Batch], divisor: float, idle: int = 0) -> Tensor:
        """Forward and backward; the sum of all losses over ``divisor``, gradients left in the door.

        ``idle``: so many more microbatches has another data rank, and this one waits along.
        """
        ...

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """The sum of all losses."""
        ...


def takes_context(module: nn.Module) -> bool:
    """Whether a module is handed the SampleContext of its microbatch."""
    return "context" in inspect.signature(module.forward).parameters


def check_losses(losses: Any, batch: Batch) -> Tensor:
    """The losses of each token, as they must be.

    Raises:
        JobError: another shape: a mean would be divided by the count once more, and nothing would tell.
    """
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != tuple(batch.targets.shape):
        raise JobError(
            f"the model's losses have the shape {shape}; forward(tokens, targets) returns the loss "
            f"of each token, {tuple(batch.targets.shape)}, 0 where ignored "
            '(F.cross_entropy with reduction="none")',
            agreed=True,
        )
    assert isinstance(losses, Tensor)
    return losses


class WholeModel:
    """One microbatch after the other; gradients travel behind the last backward pass, or each microbatch's."""

    uneven = True

    def __init__(self, model: DataParallel, device: torch.device, dtype: torch.dtype):
        self.model, self.device, self.dtype = model, device, dtype
        self._takes_context = takes_context(model.module)

    def train(self, batches: Sequence[Batch], divisor: float, idle: int = 0) -> Tensor:
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        # A rank without any microbatch takes its last part in the end of the step.
        waits = idle if batches else idle - 1
        for _ in range(waits if self.model.each else 0):
            with self.model.no_reduce():
                pass
        for batch in batches[:-1]:
            with self.model.no_reduce():
                total += self._backward(batch, divisor)
        for batch in batches[-1:]:
            total += self._backward(batch, divisor)
        return total

    def _backward(self, batch: Batch, divisor: float) -> Tensor:
        loss = self._losses(batch).sum() / divisor
        if loss.requires_grad:  # everything may be frozen
            loss.backward()
        return loss.detach()

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for batch in batches:
            total += self._losses(batch).sum()
        return total

    def _losses(self, batch: Batch) -> Tensor:
        batch = batch.to(self.device)
        context = {"context": SampleContext(batch.sample_indices)} if self._takes_context else {}
        return check_losses(self.model(batch.tokens, batch.targets, **context), batch)


class Pipelined:
    """Through the stages, by a schedule.

    A stage's gradients travel over the data axis once its last backward pass is over, or behind that pass where it is
    not split, while other stages and ranks still compute; each microbatch's by themselves where the model says so.

    Args:
        model: what holds the stages.
        stages: {stage: module} of this rank; each is called with what the one before gave, the last with the targets
            too, and each with ``context`` where it takes it.
        schedule: for as many microbatches as a step has.
        axis: the pipeline axis.
        device: of this rank.
    """

    def __init__(
        self, model: DataParallel, stages: Mapping[int, nn.Module], schedule: Schedule, axis: Axis, device: torch.device
    ):
        from gridtron.parallel.pipeline.runner import PipelineRunner

        self.uneven = False
        self.model, self.device, self.schedule = model, device, schedule
        self._takes_context = {stage: takes_context(module) for stage, module in stages.items()}
        self._batches: Sequence[Batch] = ()
        self.runner = PipelineRunner(stages, schedule, axis, forward=self._forward, gradient_scope=self._gradient_scope)
        mine = [action for action in schedule.actions[axis.rank] if action.kind in "BIW"]
        self._last_of_stage = {action.stage: action for action in mine}
        own = own_parameters(stages)
        # A stage that shares a parameter with another of this rank has not all its gradients after its own passes.
        self._alone = {stage: len(held) == len(list(stages[stage].parameters())) for stage, held in own.items()}

    def train(self, batches: Sequence[Batch], divisor: float, idle: int = 0) -> Tensor:
        assert idle == 0, idle
        if not self.schedule.splits_backward or self.model.zero < 3:
            return self._run(self.runner.step, batches, divisor)
        with self.model.deferred_step():
            # What ZeRO-3 has gathered are other parameters than those that a rank keeps.
            for module in self.runner.stages.values():
                self.runner.deferral.watch(module.parameters())
            return self._run(self.runner.step, batches, divisor)

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        return self._run(self.runner.evaluate, batches, 1)

    def _run(self, function: Any, batches: Sequence[Batch], divisor: float) -> Tensor:
        self._batches = [batch.to(self.device) for batch in batches]
        try:
            total: Tensor = function([batch.tokens for batch in self._batches], None, divisor)
        finally:
            self._batches = ()
        return total

    def _forward(self, stage: int, module: nn.Module, tensors: Sequence[Tensor], microbatch: int) -> Any:
        batch = self._batches[microbatch]
        context = {"context": SampleContext(batch.sample_indices)} if self._takes_context[stage] else {}
        if stage < self.schedule.num_stages - 1:
            return module(*tensors, **context)
        return check_losses(module(*tensors, batch.targets, **context), batch)

    @contextmanager
    def _gradient_scope(self, action: Action) -> Iterator[None]:
        stage = action.stage
        last = action == self._last_of_stage[stage]
        whole = action.kind == "B" and self._alone[stage]
        with self.model.unit_pass(stage, last, whole):
            yield
        if action.kind != "I":
            self.model.end_microbatch_of(stage)


def own_parameters(stages: Mapping[int, nn.Module]) -> dict[int, list[nn.Parameter]]:
    """Stage -> its parameters that no other stage of this rank has."""
    holders = Counter(parameter for module in stages.values() for parameter in set(module.parameters()))
    return {
        stage: [parameter for parameter in module.parameters() if holders[parameter] == 1]
        for stage, module in stages.items()
    }
