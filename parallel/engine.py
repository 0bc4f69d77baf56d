"""One training step on this rank's part of the grid: microbatches, reduction, norm, clipping, optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.communication import all_reduce
from gridtron.core.data.batch import Batch
from gridtron.core.errors import JobError
from gridtron.core.optim.config import OptimizerConfig
from gridtron.core.optim.norm import Held, clip_, gradient_norm
from gridtron.core.optim.optimizer import Optimizer
from gridtron.core.precision import wide_dtype
from gridtron.core.sharding import Sharding
from gridtron.core.training.protocols import LossSum, StepOutcome
from gridtron.parallel.data_parallel.config import DataParallelConfig
from gridtron.parallel.data_parallel.wrapper import DataParallel
from gridtron.parallel.microbatches import Microbatches, Pipelined, WholeModel
from gridtron.parallel.parameters import NamedParameter, named_parameters, unwrap
from gridtron.parallel.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from gridtron.core.grid import Grid


class TrainingEngine:
    """core.training's Engine for a module that maps (tokens, targets) to the losses of each token.

    The loss of a step is the mean over the unignored tokens of the global batch: their count is summed over the data
    axis before the first backward pass, each microbatch's loss is its sum over that count, and every reduction is a
    plain sum, so it does not matter how samples are spread over ranks and microbatches.

    Args:
        model: ``forward(tokens, targets)`` -> (batch, sequence) losses, 0 where ignored; where it takes ``context``, it
            is handed the SampleContext of the microbatch.
        grid: the process grid.
        optimizer: which optimizer, and its constants and clipping.
        data_parallel: buckets.
        build_optimizer: makes the optimizer from parameter groups, in place of the one that ``optimizer`` names.
        schedule: of the stages that ``model.stages`` holds on this rank; None: the model is whole here.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        optimizer: OptimizerConfig,
        data_parallel: DataParallelConfig | None = None,
        build_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
        schedule: Schedule | None = None,
    ):
        options = data_parallel or DataParallelConfig()
        self.grid = grid
        self.data_axis = grid.axis("data", "context")
        self.model = DataParallel(
            model, self.data_axis, zero=options.zero, bucket_bytes=options.bucket_bytes, set_grad=False
        )
        self.parameters = named_parameters(model, grid.tensor)
        trained = {item.name: item.parameter for item in self.parameters if item.parameter.requires_grad}
        self.optimizer = Optimizer(trained, optimizer, build_optimizer)
        self.grad_clip = float(getattr(optimizer, "grad_clip", 0.0))
        self._warned = False
        dtypes = [parameter.dtype for parameter in trained.values()] or [torch.float32]
        self.microbatches: Microbatches
        if schedule is None:
            self.microbatches = WholeModel(self.model, grid.device, wide_dtype(dtypes[0]))
        else:
            self.microbatches = Pipelined(self.model, _stages_of(model), schedule, grid.pipeline, grid.device)
        if build_optimizer is not None and grid.tensor.size > 1:
            self.state_dict()  # told now, not at the first checkpoint: states that cannot be saved

    # ---------------------------------------------------------------- a step
    def forward_backward(self, microbatches: Sequence[Batch]) -> LossSum:
        """Gradients of the mean loss over the unignored tokens of the global batch, reduced and ready for step()."""
        self.model.train()
        self.model.zero_grad()
        count = self._sum_over_data(sum(batch.count for batch in microbatches))
        if count == 0:
            self._warn_of_no_tokens()
        total = self.microbatches.train(microbatches, max(count, 1))
        self.model.finish_step()
        return LossSum(float(all_reduce(total, self.data_axis)), count)

    def step(self, lr: float) -> StepOutcome:
        """Norm of the whole gradient, clipping, optimizer; a non-finite norm, which all ranks see, skips the update."""
        held = self._gradients()
        counted = [item for named, item in held if named.stands_for_all]
        norm = gradient_norm(counted, [self.grid.tensor, self.grid.pipeline], self.grid.device)
        applied = bool(torch.isfinite(norm))
        if applied:
            if self.grad_clip > 0:
                clip_([item for _, item in held], norm, self.grad_clip)
            self.optimizer.step(lr, {named.name: item.gradient for named, item in held})
        self.model.zero_grad()
        return StepOutcome(float(norm), applied)

    def _gradients(self) -> list[tuple[NamedParameter, Held]]:
        found = []
        for named in self.parameters:
            gradient = self.model.gradient(named.parameter)
            if gradient is not None:
                found.append((named, Held(gradient, named.sharding, named.axis)))
        return found

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> LossSum:
        """Mean loss over the unignored tokens of all data ranks' ``batches``."""
        self.model.eval()
        held = list(batches)
        total = self.microbatches.evaluate(held)
        self.model.train()
        count = self._sum_over_data(sum(batch.count for batch in held))
        return LossSum(float(all_reduce(total, self.data_axis)) / max(count, 1), count)

    def _sum_over_data(self, count: int) -> int:
        if self.data_axis.size == 1:
            return count
        return int(all_reduce(torch.tensor(count, device=self.grid.device), self.data_axis))

    def _warn_of_no_tokens(self) -> None:
        if not self._warned and self.grid.rank == 0:
            warnings.warn("a step has no token that counts in the loss: its loss and gradients are zero", stacklevel=3)
        self._warned = True

    # ---------------------------------------------------------------- state
    def state_dict(self) -> Mapping[str, ShardedTensorView]:
        """Parameters, optimizer states and main weights under grid-independent names."""
        self.optimizer.make_states()
        first = self.data_axis.rank == 0
        views: dict[str, ShardedTensorView] = {}
        states = self.optimizer.states()
        for item in self.parameters:
            rank, writer = item.axis.rank, first and item.stands_for_all
            views[f"parameters/{item.name}"] = ShardedTensorView(item.parameter.detach(), item.sharding, rank, writer)
            for key, tensor in states.get(item.name, {}).items():
                # A state as large as the parameter lies like it; a counter is whole on every rank.
                alike = tuple(tensor.shape) == tuple(item.parameter.shape)
                if not alike and tensor.numel() > 1 and item.axis.size > 1 and item.sharding.dim is not None:
                    raise JobError(
                        f"optimizer state {key} of {item.name} has the shape {tuple(tensor.shape)}, the parameter's "
                        f"rows on this rank {tuple(item.parameter.shape)}: over grid.tensor={item.axis.size} only "
                        "states like the parameter, and single numbers, can be saved; use grid.tensor=1 with this "
                        "optimizer",
                        agreed=True,
                    )
                sharding = item.sharding if alike else Sharding.whole(tuple(tensor.shape))
                views[f"optimizer/{item.name}/{key}"] = ShardedTensorView(tensor, sharding, rank, writer)
        return views

    def load_state_dict(self, state: Mapping[str, ShardedTensorView]) -> None:
        """The views of :meth:`state_dict` are filled in place; a foreign optimizer then takes its own up."""
        self.optimizer.take_states()


def _stages_of(model: nn.Module) -> Mapping[int, nn.Module]:
    stages = getattr(unwrap(model), "stages", None)
    if not isinstance(stages, Mapping):
        raise JobError(
            f"{type(unwrap(model)).__name__} has no stages to run over grid.pipeline: give it an attribute "
            "stages={stage: module} of this rank's, or use grid.pipeline=1",
            agreed=True,
        )
    return stages
