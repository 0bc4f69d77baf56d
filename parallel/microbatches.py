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
    """Runs microbatches on this data rank; the sums that it gives are the same on all ranks of a pipeline."""

    def train(self, batches: Sequence[Batch], count: int) -> Tensor:
        """Forward and backward; the sum of all losses over ``count``, gradients left in the door."""
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
    """One microbatch after the other; gradients travel behind the last backward pass."""

    def __init__(self, model: DataParallel, device: torch.device, dtype: torch.dtype):
        self.model, self.device, self.dtype = model, device, dtype
        self._takes_context = takes_context(model.module)

    def train(self, batches: Sequence[Batch], count: int) -> Tensor:
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for batch in batches[:-1]:
            with self.model.no_reduce():
                total += self._backward(batch, count)
        for batch in batches[-1:]:
            total += self._backward(batch, count)
        return total

    def _backward(self, batch: Batch, count: int) -> Tensor:
        loss = self._losses(batch).sum() / count
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
    not split, while other stages and ranks still compute.

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

        self.model, self.device, self.schedule = model, device, schedule
        self._takes_context = {stage: takes_context(module) for stage, module in stages.items()}
        self._batches: Sequence[Batch] = ()
        self.runner = PipelineRunner(stages, schedule, axis, forward=self._forward, gradient_scope=self._gradient_scope)
        mine = [action for action in schedule.actions[axis.rank] if action.kind in "BIW"]
        self._last_of_stage = {action.stage: action for action in mine}
        holders = Counter(parameter for module in stages.values() for parameter in set(module.parameters()))
        self._own = {
            stage: [parameter for parameter in module.parameters() if holders[parameter] == 1]
            for stage, module in stages.items()
        }
        self._alone = {stage: len(own) == len(list(stages[stage].parameters())) for stage, own in self._own.items()}

    def train(self, batches: Sequence[Batch], count: int) -> Tensor:
        return self._run(self.runner.step, batches, count)

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        return self._run(self.runner.evaluate, batches, 1)

    def _run(self, function: Any, batches: Sequence[Batch], divisor: int) -> Tensor:
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
        if last and action.kind == "B" and self._alone[stage]:
            yield
            return
        with self.model.no_reduce():
            yield
        if last:
            # Parameters of two stages of this rank wait for the end of the step.
            self.model.complete(self._own[stage])
