"""One training step on this rank's part of the grid: microbatches, reduction, norm, clipping, optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.communication import all_reduce, gather_values
from gridtron.core.data.batch import IGNORE_INDEX, Batch
from gridtron.core.errors import JobError
from gridtron.core.grid import Axis
from gridtron.core.optim.config import OptimizerConfig
from gridtron.core.optim.norm import Held, clip_, gradient_norm, norms_by_layer, norms_by_name
from gridtron.core.optim.optimizer import Optimizer
from gridtron.core.precision import wide_dtype
from gridtron.core.torch_compat import scale_
from gridtron.core.training.protocols import LossSum, StepOutcome
from gridtron.parallel.data_parallel.config import DataParallelConfig
from gridtron.parallel.data_parallel.wrapper import DataParallel
from gridtron.parallel.microbatches import Microbatches, Pipelined, WholeModel, own_parameters
from gridtron.parallel.parameters import NamedParameter, named_parameters, unwrap
from gridtron.parallel.pipeline.schedule import Schedule
from gridtron.parallel.run_state import run_state, take_run_state

if TYPE_CHECKING:
    from gridtron.core.grid import Grid
    from gridtron.core.precision import LossScaler


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
        data_parallel: ZeRO stage, buckets.
        build_optimizer: makes the optimizer from parameter groups, in place of the one that ``optimizer`` names.
        schedule: of the stages that ``model.stages`` holds on this rank; None: the model is whole here.
        loss_scaler: of a run in float16; None: losses are not scaled.
        grad_norms: norms of each "layer" or "parameter" are told with every step.
        adamw: implementation of AdamW (see Optimizer).
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        optimizer: OptimizerConfig,
        data_parallel: DataParallelConfig | None = None,
        build_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
        schedule: Schedule | None = None,
        loss_scaler: LossScaler | None = None,
        grad_norms: str | None = None,
        adamw: str = "auto",
    ):
        options = data_parallel or DataParallelConfig()
        self.grid = grid
        self.data_axis = grid.axis("data", "context")
        stages = None if schedule is None else _stages_of(model)
        # Before parameters are cut: weights in the model's own dtype.
        narrow = {p.dtype for p in model.parameters() if wide_dtype(p.dtype) != p.dtype}
        self.dtype = next(iter(narrow), None)
        try:
            self.model = DataParallel(
                model,
                self.data_axis,
                zero=options.zero,
                bucket_bytes=options.bucket_bytes,
                shard_size=options.shard_size,
                set_grad=False,
                reduce=options.reduce,
                units=None if stages is None else own_parameters(stages),
                defer=schedule is not None and schedule.splits_backward,
                agreed=True,
            )
        except ValueError as fault:
            raise JobError(f"data_parallel: {fault}", agreed=True) from None
        self.parameters = named_parameters(model, grid.tensor)
        self.pieces = {item.name: self.model.piece(item) for item in self.parameters}
        trained = [item for item in self.parameters if item.parameter.requires_grad]
        parts = {item.name: self.model.part(item.parameter) for item in trained}
        pieces = {name: self.pieces[name] for name in parts}
        self.optimizer = Optimizer(parts, optimizer, build_optimizer, pieces, self.dtype, adamw)
        self.grad_clip = float(getattr(optimizer, "grad_clip", 0.0))
        self.scaler = loss_scaler
        self._grad_norms = grad_norms
        self._names = _names_of_all_stages(self.parameters, grid.pipeline) if grad_norms else None
        self._warned = False
        self.microbatches: Microbatches
        if stages is None or schedule is None:
            dtypes = [item.parameter.dtype for item in self.parameters] or [torch.float32]
            self.microbatches = WholeModel(self.model, grid.device, wide_dtype(dtypes[0]))
        else:
            self.microbatches = Pipelined(self.model, stages, schedule, grid.pipeline, grid.device)
        if build_optimizer is not None and grid.tensor.size > 1:
            self.state_dict()  # told now, not at the first checkpoint: states that cannot be saved

    # ---------------------------------------------------------------- a step
    def forward_backward(self, microbatches: Sequence[Batch]) -> LossSum:
        """Gradients of the mean loss over the unignored tokens of the global batch, reduced and ready for step()."""
        self.model.train()
        self.model.zero_grad()
        count, batches, idle = self._agree(microbatches)
        if count == 0:
            self._warn_of_no_tokens()
        scale = 1.0 if self.scaler is None else self.scaler.scale
        total = self.microbatches.train(batches, max(count, 1) / scale, idle)
        self.model.finish_step()
        if self.scaler is not None:
            scale_([item.gradient for _, item in self._gradients()], 1 / scale)
        return LossSum(float(all_reduce(total, self.data_axis)) / scale, count)

    def step(self, lr: float) -> StepOutcome:
        """Norm of the whole gradient, clipping, optimizer; a non-finite norm, which all ranks see, skips the update."""
        held = self._gradients()
        counted = {named.name: item for named, item in held if named.stands_for_all}
        where = ([self.grid.tensor, self.grid.pipeline], self.grid.device, self._cut_over)
        norm = gradient_norm(list(counted.values()), *where)
        norms = None if self._names is None else norms_by_name(counted, self._names, *where)
        if norms is not None and self._grad_norms == "layer":
            norms = norms_by_layer(norms)
        applied = bool(torch.isfinite(norm))
        if applied:
            if self.grad_clip > 0:
                clip_([item for _, item in held], norm, self.grad_clip)
            self.optimizer.step(lr, {named.name: item.gradient for named, item in held})
        self.model.zero_grad()
        if applied:
            self.model.gather_parameters(updated=True)
        scale = None if self.scaler is None else self.scaler.scale
        if self.scaler is not None:
            self.scaler.update(applied)
        return StepOutcome(float(norm), applied, scale, norms)

    @property
    def _cut_over(self) -> Axis | None:
        return self.model.shards if self.model.shards.size > 1 else None

    def _gradients(self) -> list[tuple[NamedParameter, Held]]:
        found = []
        for named in self.parameters:
            gradient = self.model.gradient(named.parameter)
            if gradient is not None:
                found.append((named, Held(gradient, self.pieces[named.name])))
        return found

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> LossSum:
        """Mean loss over the unignored tokens of all data ranks' ``batches``."""
        self.model.eval()
        count, held, _ = self._agree(list(batches))
        total = self.microbatches.evaluate(held)
        self.model.train()
        return LossSum(float(all_reduce(total, self.data_axis)) / max(count, 1), count)

    def _agree(self, batches: Sequence[Batch]) -> tuple[int, Sequence[Batch], int]:
        """The global count of tokens; this rank's batches, with empty ones where each pass fetches parameters from
        ranks that have more; and how many those have more.

        Raises:
            JobError: on every rank: different numbers of microbatches where a schedule has one number.
        """
        count = sum(batch.count for batch in batches)
        size, rank = self.data_axis.size, self.data_axis.rank
        if size == 1:
            return count, batches, 0
        told = torch.zeros(1 + 2 * size, dtype=torch.int64, device=self.grid.device)
        told[0], told[1 + rank] = count, len(batches)
        told[1 + size + rank] = batches[0].tokens.shape[1] if batches else 0
        count, *sizes = all_reduce(told, self.data_axis).tolist()
        numbers, length = sizes[:size], max(sizes[size:])
        idle = max(numbers) - len(batches)
        if min(numbers) != max(numbers) and not self.microbatches.uneven:
            raise JobError(
                f"data ranks have {', '.join(map(str, numbers))} microbatches, and a pipeline schedule has one number; "
                "give every data rank as many",
                agreed=True,
            )
        if self.model.zero == 3 and idle:
            return count, [empty_batch(length)] * idle + list(batches), 0
        return count, batches, idle

    def _warn_of_no_tokens(self) -> None:
        if not self._warned and self.grid.rank == 0:
            warnings.warn("a step has no token that counts in the loss: its loss and gradients are zero", stacklevel=3)
        self._warned = True

    # ---------------------------------------------------------------- state
    def state_dict(self) -> Mapping[str, ShardedTensorView]:
        """Parameters, optimizer states, main weights and the loss scale under grid-independent names."""
        return run_state(self)

    def load_state_dict(self, state: Mapping[str, ShardedTensorView]) -> None:
        """The views of :meth:`state_dict` are filled in place; what keeps copies of its own takes them up."""
        take_run_state(self, state)


def empty_batch(length: int) -> Batch:
    """One sample without a token that counts."""
    tokens = torch.zeros(1, length, dtype=torch.int64)
    return Batch.of(tokens, torch.full_like(tokens, IGNORE_INDEX))


def _names_of_all_stages(parameters: Sequence[NamedParameter], pipeline: Axis) -> list[str]:
    """The same list on every rank of the pipeline, a weight of two stages once."""
    told = gather_values([item.name for item in parameters if item.parameter.requires_grad], pipeline)
    return list(dict.fromkeys(name for names in told for name in names))


def _stages_of(model: nn.Module) -> Mapping[int, nn.Module]:
    stages = getattr(unwrap(model), "stages", None)
    if not isinstance(stages, Mapping):
        raise JobError(
            f"{type(unwrap(model)).__name__} has no stages to run over grid.pipeline: give it an attribute "
            "stages={stage: module} of this rank's, or use grid.pipeline=1",
            agreed=True,
        )
    return stages
