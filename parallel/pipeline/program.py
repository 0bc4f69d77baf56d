"""What lowering makes of a schedule: per rank the instructions that the runner follows and the prover proves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gridtron.parallel.pipeline.action import Action
from gridtron.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one stage computed, on its way to the neighbouring stage on another rank.

    Args:
        kind: "activation" (to the next stage) or "gradient" (of the input, to the stage before).
        stage: the stage that computed it.
        microbatch: of which microbatch.
        source, target: ranks along the pipeline axis.
    """

    kind: str
    stage: int
    microbatch: int
    source: int
    target: int

    @property
    def target_stage(self) -> int:
        return self.stage + 1 if self.kind == "activation" else self.stage - 1

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}{'F' if self.kind == 'activation' else 'B'}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a rank's program.

    Args:
        operation: "compute" an Action; "send" (start sending) or "receive" (post the receive of) or "wait" (until it
            is here, before what needs it) for a Transfer.
        subject: that Action or Transfer.
    """

    operation: str
    subject: Action | Transfer

    def __str__(self) -> str:
        return str(self.subject) if self.operation == "compute" else f"{self.operation} {self.subject}"


@dataclass(frozen=True)
class Program:
    """A lowered schedule.

    Stages that are neighbours on one rank hand over without a transfer. On every pair of ranks the transfers of both
    directions have one order, which both ranks post in.

    Args:
        schedule: the table it came from.
        instructions: per rank, in order.
    """

    schedule: Schedule
    instructions: tuple[tuple[Instruction, ...], ...]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every transfer once, in an order that all ranks share."""
        return tuple(
            item.subject
            for instructions in self.instructions
            for item in instructions
            if item.operation == "send" and isinstance(item.subject, Transfer)
        )

    def validate(self) -> Program:
        """Proves that it ends when every send blocks until its receive is posted. Returns itself.

        Raises:
            ValueError: with the grid of ranks by steps and the bad cell, and for a deadlock the cycle.
        """
        from gridtron.parallel.pipeline.prove import prove_program

        prove_program(self)
        return self
