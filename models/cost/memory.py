"""Bytes that one rank of a grid holds between steps and at a step's peak, as pure functions of the plan.

States: Rajbhandari et al. 2020 (arXiv:1910.02054, section 3 and figure 1), with a wide (float32 or wider) gradient and,
for parameters in 16 bit, a wide copy of them: "2 + 2 + K" there is here w + W + K. Activations: see
:mod:`gridtron.models.cost.activations`; how many microbatches are held is the schedule's (Narayanan et al. 2021,
arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gridtron.models.config import GPTConfig
from gridtron.models.cost.activations import (
    BYTES,
    Microbatch,
    TensorShare,
    deferred_bytes,
    layer_activations,
    layer_working_bytes,
    loss_working_bytes,
    stage_activations,
    stage_outputs,
)
from gridtron.models.cost.parameters import ParameterCount, rank_layer_parameters, rank_root_parameters
from gridtron.models.partition import layer_ranges
from gridtron.parallel.data_parallel.config import reduces_each
from gridtron.parallel.pipeline.schedule import Schedule
from gridtron.parallel.pipeline.simulate import peak_held
from gridtron.parallel.recompute import RecomputeConfig, layer_policies


@dataclass(frozen=True)
class MemorySettings:
    """What decides how many bytes a rank holds.

    Args:
        config: shape of the model, with vocab_size.
        sequence_length: tokens of a sample.
        micro_batch_size: samples of a microbatch.
        microbatches: of a step on each data rank, where there is no schedule.
        data: ranks of the data and context axes together, over which ZeRO shards.
        tensor: ranks of the tensor axis.
        schedule: of the pipeline's stages; None: the model is whole on each rank.
        layers_per_stage: default: balanced by cost.
        sequence_parallel: see Microbatch.
        recompute: one choice for all stages; not "auto".
        policies: of each layer of the model, in place of ``recompute``.
        zero: 0, 1 (optimizer states sharded), 2 (gradients too), 3 (parameters too).
        shard_size: ranks that share one set of states; default: all of data.
        bucket_bytes: of gradients that travel together.
        reduce: "each" microbatch's gradients or once the "last"; default: each from zero 2 on.
        precision: "fp32", "bf16", "fp16" or "fp64".
        optimizer: "adamw", "sgd" or "muon".
        momentum: of SGD and Muon; 0: no state.
        attention, dropout_mask, chunked_loss: see Microbatch.

    Raises:
        ValueError: every value that is none of its choices, or that does not fit another.
    """

    config: GPTConfig
    sequence_length: int
    micro_batch_size: int = 1
    microbatches: int = 1
    data: int = 1
    tensor: int = 1
    schedule: Schedule | None = None
    layers_per_stage: tuple[int, ...] | None = None
    sequence_parallel: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    policies: tuple[str, ...] | None = None
    zero: int = 0
    shard_size: int | None = None
    bucket_bytes: int = 25 * 2**20
    reduce: str | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    momentum: float = 0.0
    attention: str = "flash"
    dropout_mask: str = "recomputed"
    chunked_loss: bool = False

    def __post_init__(self) -> None:
        known = {
            "zero": (0, 1, 2, 3),
            "precision": tuple(BYTES),
            "optimizer": ("adamw", "sgd", "muon"),
            "attention": ("unfused", "flash"),
            "dropout_mask": ("stored", "recomputed"),
            "reduce": (None, "each", "last"),
        }
        faults = [
            f"{name}={getattr(self, name)!r}: one of {', '.join(map(str, choices))}"
            for name, choices in known.items()
            if getattr(self, name) not in choices
        ]
        if min(self.data, self.tensor, self.micro_batch_size, self.microbatches, self.sequence_length) < 1:
            faults.append("data, tensor, micro_batch_size, microbatches and sequence_length must be at least 1")
        elif self.shard_size is not None and (self.shard_size < 1 or self.data % self.shard_size):
            faults.append(f"shard_size={self.shard_size} must divide data={self.data}")
        if self.config.vocab_size is None:
            faults.append("config.vocab_size is not set")
        if self.policies is not None and len(self.policies) != self.config.num_layers:
            faults.append(f"{len(self.policies)} policies for {self.config.num_layers} layers")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def shards(self) -> int:
        """Over how many ranks sharded states are spread."""
        return self.shard_size or self.data

    @property
    def stage_of_zero(self) -> int:
        """Of ZeRO, 0 where there is no other rank to share with."""
        return self.zero if self.shards > 1 else 0

    @property
    def itemsize(self) -> int:
        return BYTES[self.precision]

    @property
    def wide(self) -> int:
        return max(4, self.itemsize)

    @property
    def narrow(self) -> bool:
        return self.itemsize < self.wide

    @property
    def operations(self) -> tuple[str, ...]:
        """What is recomputed of layers whose policy is "operations"."""
        return tuple(self.recompute.operations or ())

    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of every stage's layers."""
        stages = 1 if self.schedule is None else self.schedule.num_stages
        counts = self.layers_per_stage if stages > 1 else None
        return layer_ranges(self.config, stages, counts, self.sequence_length)

    def stages(self, pipeline_rank: int) -> tuple[int, ...]:
        """Stages that a rank of the pipeline holds."""
        return (0,) if self.schedule is None else self.schedule.stages(pipeline_rank)

    def policies_of(self, stage: int) -> tuple[str, ...]:
        """What is recomputed of each layer of a stage."""
        start, stop = self.ranges()[stage]
        if self.policies is not None:
            return self.policies[start:stop]
        return layer_policies(self.recompute, stop - start)

    def microbatch(self, tensor_rank: int = 0) -> Microbatch:
        return Microbatch(
            self.config,
            self.micro_batch_size,
            self.sequence_length,
            self.tensor,
            tensor_rank,
            self.sequence_parallel,
            self.itemsize,
            self.attention,
            self.dropout_mask,
            self.chunked_loss,
        )


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    Args:
        weights: parameters as the layers use them (under zero 3 the wide shards).
        main_weights: wide copies of narrow parameters.
        gradients: wide, as the optimizer gets them.
        gradients_stay: whether they are there between steps too.
        optimizer: states.
        activations: at most, of all microbatches in flight.
        peak: the most at one moment of a step.
    """

    weights: int
    main_weights: int
    gradients: int
    gradients_stay: bool
    optimizer: int
    activations: int
    peak: int

    @property
    def between_steps(self) -> int:
        kept = self.gradients if self.gradients_stay else 0
        return self.weights + self.main_weights + kept + self.optimizer


def rank_parameters(settings: MemorySettings, pipeline_rank: int = 0, tensor_rank: int = 0) -> ParameterCount:
    """Elements of the parameters that a rank holds before ZeRO: its stages, its tensor rows; a tied embedding on both
    the first and the last stage where they lie on two ranks."""
    share = TensorShare.of(settings.config, settings.tensor, tensor_rank)
    ranges, stages = settings.ranges(), settings.stages(pipeline_rank)
    layer = rank_layer_parameters(settings.config, share)
    count = sum(ranges[stage][1] - ranges[stage][0] for stage in stages)
    root = rank_root_parameters(settings.config, share, 0 in stages, len(ranges) - 1 in stages)
    return ParameterCount(count * layer.matrices, count * layer.others) + root


def optimizer_bytes(settings: MemorySettings, count: ParameterCount) -> int:
    """States of a whole set of parameters: AdamW two wide numbers each (Loshchilov and Hutter 2019,
    arXiv:1711.05101), SGD one with momentum, Muon one, with momentum, for hidden matrices and AdamW's two for all else
    (Jordan et al. 2024)."""
    numbers = {
        "adamw": 2 * count.total,
        "sgd": count.total if settings.momentum else 0,
        "muon": (count.matrices if settings.momentum else 0) + 2 * count.others,
    }[settings.optimizer]
    return numbers * settings.wide


def rank_memory(settings: MemorySettings, pipeline_rank: int = 0, tensor_rank: int = 0) -> RankMemory:
    """What one rank holds.

    Args:
        settings: of the run.
        pipeline_rank, tensor_rank: which rank; the first of the tensor axis holds the most.
    """
    count = rank_parameters(settings, pipeline_rank, tensor_rank)
    zero, w, W = settings.stage_of_zero, settings.itemsize, settings.wide
    shards = settings.shards
    weights = -(-count.total * W // shards) if zero == 3 else count.total * w
    main = count.total * W if settings.narrow and zero < 3 else 0
    gradients = -(-count.total * W // shards) if zero >= 2 else count.total * W
    if zero < 2 and settings.data > 1 and reduces_each(zero, settings.reduce):
        # What is reduced is kept beside what gathers for the next reduction.
        gradients += -(-count.total * W // shards) if zero else count.total * W
    states = optimizer_bytes(settings, count)
    if zero >= 1:
        main, states = -(-main // shards), -(-states // shards)
    # One plain process: gradients are autograd's own, made in the backward pass and let go after the step.
    plain = zero == 0 and settings.data == 1 and not settings.narrow
    activations = activation_bytes(settings, pipeline_rank, tensor_rank)
    fixed = weights + main + states
    grown = plain and settings.schedule is None and settings.microbatches == 1
    most = _most_of_a_backward_pass(settings, pipeline_rank, tensor_rank, w if grown else 0)
    # Once all gradients are there nothing else is left, but they may outweigh the activations.
    peak = fixed + max(most + activations + travelling_bytes(settings, count) + (0 if grown else gradients), gradients)
    return RankMemory(weights, main, gradients, not plain and zero < 3, states, activations, peak)


def _most_of_a_backward_pass(settings: MemorySettings, pipeline_rank: int, tensor_rank: int, gradient: int) -> int:
    """The most that a backward pass of one microbatch holds beyond what all forward passes kept: at least 0, the end
    of a forward pass.

    Args:
        gradient: bytes an element of gradients that grow in the pass; 0: they are held elsewhere.
    """
    micro, ranges = settings.microbatch(tensor_rank), settings.ranges()
    share, most = micro.share, 0
    for stage in settings.stages(pipeline_rank):
        first, last = stage == 0, stage == len(ranges) - 1
        layer = rank_layer_parameters(settings.config, share).total * gradient
        now = 0
        if last:
            most = max(most, loss_working_bytes(micro))
            now += rank_root_parameters(settings.config, share, False, True).total * gradient
            now -= sum(stage_outputs(micro).values())
        for policy in reversed(settings.policies_of(stage)):
            operations = settings.operations
            most = max(most, now + layer_working_bytes(micro, policy, operations) + layer // 2)
            now += layer - sum(layer_activations(micro, policy, operations).values())
        if first:
            root = rank_root_parameters(settings.config, share, True, False).total * gradient
            most = max(most, now + root + micro.residual)
    return most


def travelling_bytes(settings: MemorySettings, count: ParameterCount) -> int:
    """What a backward pass holds of gradients and parameters on their way: under zero 2 two buckets of wide gradients
    (one filling, one travelling); under zero 3 the whole parameters and gradients of two layers and of what is outside
    of layers (Zhao et al. 2023, arXiv:2304.11277, section 3.2.2). All gradients where they are reduced once; all
    parameters as well where a schedule's weight gradients come apart from the backward pass under zero 3."""
    zero = settings.stage_of_zero
    if zero < 2:
        return 0
    whole = count.total * settings.wide
    if zero == 3 and settings.schedule is not None and settings.schedule.splits_backward:
        return count.total * settings.itemsize + whole
    if zero == 2:
        return whole if not reduces_each(zero, settings.reduce) else min(2 * settings.bucket_bytes, whole)
    share = TensorShare.of(settings.config, settings.tensor)
    gathered = 2 * rank_layer_parameters(settings.config, share).total
    gathered += rank_root_parameters(settings.config, share, True, True).total
    moving = min(gathered, count.total) * settings.itemsize
    return moving + (moving if reduces_each(zero, settings.reduce) else whole)


def activation_bytes(
    settings: MemorySettings, pipeline_rank: int = 0, tensor_rank: int = 0, leave_out: frozenset[str] = frozenset()
) -> int:
    """The most that a rank's microbatches in flight keep, by the schedule's own order of F, I, W and B.

    Args:
        settings: of the run.
        pipeline_rank, tensor_rank: which rank.
        leave_out: names of entries not to count, as ``activations.NOT_IN_THE_PAPER``.
    """
    micro, ranges = settings.microbatch(tensor_rank), settings.ranges()
    held, kept = [], []
    for stage, (start, stop) in enumerate(ranges):
        policies, operations = settings.policies_of(stage), settings.operations
        parts = stage_activations(micro, policies, stage == 0, stage == len(ranges) - 1, operations)
        held.append(sum(size for name, size in parts.items() if name not in leave_out))
        kept.append(deferred_bytes(micro, stop - start))
    schedule = settings.schedule
    if schedule is None:
        return held[0]
    return int(peak_held(schedule.actions[pipeline_rank], held, kept, schedule.forward_only))
