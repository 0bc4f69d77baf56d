"""Options of a run, its loop, its evaluation and its logs."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class RunConfig:
    directory: str | None = option(None, "where the run writes; null: a timestamped folder under runs/", path=True)


@dataclass(frozen=True)
class TrainConfig:
    steps: int = option(1000, "optimizer steps of the whole run", minimum=1)
    stop_after: int | None = option(
        None,
        "end cleanly, with a checkpoint, after this step; the schedule of the rate is unchanged; null: none",
        minimum=1,
    )
    global_batch_size: int = option(16, "sequences a step, over all data ranks", minimum=1, maximum=2**31)
    micro_batch_size: int = option(2, "sequences a data rank runs at once", minimum=1)
    sequence_length: int = option(256, "tokens a sequence", minimum=1)
    seed: int = option(0, "of the weights, the order of the data and dropout", minimum=0)
    compile: bool = option(False, "compile every decoder layer by torch.compile, as one graph each")
    on_nonfinite: str = option("skip", "a non-finite gradient: skip the step or stop", choices=("skip", "stop"))
    max_nonfinite: int = option(10, "stop after so many non-finite steps in a row; 0: never", minimum=0)
    garbage_collection_every: int = option(
        0, "collect Python garbage only every so many steps; 0: leave it to Python", minimum=0
    )


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = option(0, "steps between evaluations on the held-out part; 0: none", minimum=0)
    steps: int = option(8, "global batches an evaluation reads at most", minimum=1)


@dataclass(frozen=True)
class LoggingConfig:
    every: int = option(1, "steps between rows on the console", minimum=1)
    tensorboard: bool = option(True, "write TensorBoard events to the run's tensorboard/")
    grad_norms: str | None = option(
        None,
        "norms of the gradient's parts, before clipping, in every row of metrics.jsonl and in TensorBoard: of each "
        "layer or of each parameter; null: none",
        choices=("layer", "parameter"),
    )
    trace: bool = option(
        False,
        "write a step's real timeline, each pipeline rank's, as a Chrome trace to the run's trace/, and tell the "
        "measured bubble beside the simulated one; no effect at grid.pipeline=1",
    )
    profile: str | None = option(
        None, "FIRST:LAST, the steps of a profiler window, written to the run's profile/; null: none"
    )
