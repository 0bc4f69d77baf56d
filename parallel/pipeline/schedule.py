"""A pipeline schedule as a value: which rank computes what, in which order. It sends nothing."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.parallel.pipeline.action import Action


@dataclass(frozen=True)
class Schedule:
    """A table of actions, and where each stage lies.

    Args:
        name: the family's, or the file's.
        microbatches: how many.
        placement: the rank of each stage.
        actions: per rank, what it computes, in order.
        forward_only: no backward anywhere (evaluation).
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights come apart from those of inputs."""
        return any(action.kind in "IW" for row in self.actions for action in row)

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def stage_rank(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return self.placement[stage]

    def validate(self) -> Schedule:
        """Proves the table: complete, in an order that each rank can follow, without a cycle. Returns itself.

        Raises:
            ValueError: with the grid of ranks by steps and the bad cell marked.
        """
        from gridtron.parallel.pipeline.prove import prove_schedule

        prove_schedule(self)
        return self
