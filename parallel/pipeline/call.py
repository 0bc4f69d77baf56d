"""One pass of a rank through its program: what it holds between instructions, and a handler for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gridtron.parallel.fresh import Fresh
from gridtron.parallel.gradient_door import Work
from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.channel import Spec
from gridtron.parallel.pipeline.program import Program, Transfer
from gridtron.parallel.pipeline.split_backward import backward_input

if TYPE_CHECKING:
    from gridtron.parallel.pipeline.runner import PipelineRunner

Loss = Callable[[Any, Any], Tensor]
Forward = Callable[[int, nn.Module, Sequence[Tensor], int], Any]


@dataclass
class _Held:
    """What stays of a forward pass until its backward pass.

    Args:
        leaves: the received tensors, detached; gradients of those that require one are sent back.
        edges: where the backward pass begins; the outputs themselves are let go.
        specs: of the outputs that require a gradient.
    """

    leaves: list[Tensor]
    edges: list[GradientEdge]
    specs: tuple[Spec, ...]


class Call:
    """The state of one call of :meth:`PipelineRunner.step` or ``evaluate``."""

    def __init__(self, runner: PipelineRunner, program: Program, inputs: Any, targets: Any, divisor: Any, train: bool):
        self.runner, self.program = runner, program
        self.inputs, self.targets, self.divisor, self.train = inputs, targets, divisor, train
        self.rank = runner.axis.rank
        self.last = program.schedule.num_stages - 1
        self.total = torch.zeros((), dtype=torch.float64, device=runner.device)
        actions = program.schedule.actions[self.rank]
        self.split = {(action.stage, action.microbatch) for action in actions if action.kind == "I"}
        # By (stage that takes it, microbatch).
        self.activations: dict[tuple[int, int], list[Tensor]] = {}
        self.gradients: dict[tuple[int, int], list[Tensor]] = {}
        self.held: dict[tuple[int, int], _Held] = {}
        self.work: dict[tuple[int, int], list[Work]] = {}
        self._compute = {"F": self._forward, "B": self._backward, "I": self._input_grad, "W": self._weight_grad}
        self._transfer = {"send": self._send, "receive": self._receive, "wait": self._wait}
        self._outgoing: dict[Transfer, list[Tensor]] = {}
        self._sent = {
            (t.subject.kind, t.subject.stage, t.subject.microbatch): t.subject
            for t in program.instructions[self.rank]
            if t.operation == "send" and isinstance(t.subject, Transfer)
        }

    def run(self) -> Tensor:
        """This rank's part of the total."""
        for instruction in self.program.instructions[self.rank]:
            subject = instruction.subject
            if isinstance(subject, Transfer):
                self._transfer[instruction.operation](subject)
            else:
                with self._traced(subject):
                    self._compute[subject.kind](subject)
        assert not (self.activations or self.gradients or self.held or self.work or self._outgoing), "left over"
        return self.total

    def _traced(self, action: Action) -> AbstractContextManager[None]:
        trace = self.runner.trace
        return trace.span(action) if trace is not None and self.train else nullcontext()

    # ---------------------------------------------------------------- transfers
    def _send(self, transfer: Transfer) -> None:
        self.runner.channel.send(transfer, self._outgoing.pop(transfer))

    def _receive(self, transfer: Transfer) -> None:
        specs = None
        if transfer.kind == "gradient":
            specs = tuple(
                Spec(spec.shape, spec.dtype, False)
                for spec in self.held[transfer.target_stage, transfer.microbatch].specs
            )
        self.runner.channel.post(transfer, specs)

    def _wait(self, transfer: Transfer) -> None:
        place = self.activations if transfer.kind == "activation" else self.gradients
        place[transfer.target_stage, transfer.microbatch] = self.runner.channel.wait(transfer)

    def _give(self, kind: str, stage: int, microbatch: int, tensors: list[Tensor]) -> None:
        """To the stage after (activation) or before (gradient): over the channel, or at once where it is here."""
        transfer = self._sent.get((kind, stage, microbatch))
        if transfer is not None:
            self._outgoing[transfer] = tensors
        elif kind == "activation":
            self.activations[stage + 1, microbatch] = tensors
        else:
            self.gradients[stage - 1, microbatch] = tensors

    # ---------------------------------------------------------------- computations
    def _forward(self, action: Action) -> None:
        stage, microbatch, runner = action.stage, action.microbatch, self.runner
        if stage == 0:
            given = self.inputs[microbatch]
            leaves, args = [], list(given) if isinstance(given, (tuple, list)) else [given]
        else:
            received = self.activations.pop((stage, microbatch))
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad and self.train) for tensor in received]
            # A stage may begin with an operation in place, as it may in one process.
            args = [Fresh.apply(tensor) if tensor.requires_grad else tensor for tensor in leaves]
        with runner.deferral.splitting((stage, microbatch) in self.split):
            output = runner.forward(stage, runner.stages[stage], args, microbatch)
            if stage == self.last:
                outputs = [self._loss(output, microbatch)]
            else:
                outputs = _tensors_of(output, stage)
        if self.train:
            trained = [tensor for tensor in outputs if tensor.requires_grad]
            # A tensor that a stage only passes on is a leaf here; a view has an edge of its own.
            edges = [get_gradient_edge(tensor.view_as(tensor) if tensor.is_leaf else tensor) for tensor in trained]
            self.held[stage, microbatch] = _Held(leaves, edges, tuple(Spec.of(tensor) for tensor in trained))
        if stage != self.last:
            self._give("activation", stage, microbatch, outputs)

    def _loss(self, output: Any, microbatch: int) -> Tensor:
        losses = output if self.runner.loss is None else self.runner.loss(output, self.targets[microbatch])
        if not isinstance(losses, Tensor):
            raise ValueError(f"the loss of microbatch {microbatch} is a {type(losses).__name__}; it must be a tensor")
        loss = losses.sum() / self.divisor
        self.total += loss.detach()
        return loss

    def _arrived(self, stage: int, microbatch: int, held: _Held) -> list[Tensor]:
        """The gradients of a stage's outputs."""
        if stage == self.last:
            return [torch.ones(spec.shape, dtype=spec.dtype, device=self.runner.device) for spec in held.specs]
        return self.gradients.pop((stage, microbatch))

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        held = self.held.pop((stage, microbatch))
        gradients = self._arrived(stage, microbatch, held)
        if held.edges:
            with self.runner.gradient_scope(action):
                torch.autograd.backward(held.edges, gradients)
        self._give_back(stage, microbatch, held, [tensor.grad for tensor in held.leaves if tensor.requires_grad])

    def _input_grad(self, action: Action) -> None:
        stage, microbatch, runner = action.stage, action.microbatch, self.runner
        held = self.held.pop((stage, microbatch))
        gradients = self._arrived(stage, microbatch, held)
        leaves = [tensor for tensor in held.leaves if tensor.requires_grad]
        found: list[Tensor | None] = [None] * len(leaves)
        work: list[Work] = []
        if held.edges:
            parameters = [item for item in runner.stages[stage].parameters() if item.requires_grad]
            with runner.gradient_scope(action):
                found, work = backward_input(held.edges, gradients, leaves, parameters, runner.deferral)
        self.work[stage, microbatch] = work
        self._give_back(stage, microbatch, held, found)

    def _weight_grad(self, action: Action) -> None:
        with self.runner.gradient_scope(action):
            for finish in self.work.pop((action.stage, action.microbatch)):
                finish()

    def _give_back(self, stage: int, microbatch: int, held: _Held, found: Sequence[Tensor | None]) -> None:
        if stage > 0:
            leaves = [tensor for tensor in held.leaves if tensor.requires_grad]
            # A stage that makes no use of an input gives no gradient, and its neighbour waits for one.
            self._give(
                "gradient",
                stage,
                microbatch,
                [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)],
            )


def _tensors_of(output: Any, stage: int) -> list[Tensor]:
    outputs = list(output) if isinstance(output, (tuple, list)) else [output]
    for item in outputs:
        if not isinstance(item, Tensor):
            raise ValueError(
                f"stage {stage} gives a {type(item).__name__}; a stage gives a tensor or a tuple of tensors, which is "
                "what the next one takes"
            )
    return outputs
