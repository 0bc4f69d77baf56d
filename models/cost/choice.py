"""The cheapest recomputation that fits a budget of bytes: pure functions of the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gridtron.models.cost.flops import recomputed_flops
from gridtron.models.cost.memory import MemorySettings, rank_memory


@dataclass(frozen=True)
class Candidate:
    """One way to recompute on one pipeline rank.

    Args:
        name: for people.
        policies: stage -> what is recomputed of each of its layers.
        flops: run again in the backward pass, a token.
        peak: bytes that the rank holds at a step's peak.
    """

    name: str
    policies: dict[int, tuple[str, ...]]
    flops: int
    peak: int


class BudgetError(ValueError):
    """Nothing fits; ``need`` bytes are the least that would."""

    def __init__(self, message: str, need: int):
        super().__init__(message)
        self.need = need


def choose_policy(candidates: Sequence[Candidate], budget: int) -> Candidate:
    """The candidate that fits ``budget`` and recomputes least; of equals the one that holds least.

    Raises:
        BudgetError: none fits, with the smallest need.
    """
    fitting = [candidate for candidate in candidates if candidate.peak <= budget]
    if not fitting:
        least = min(candidates, key=lambda candidate: candidate.peak)
        raise BudgetError(
            f"no recomputation fits {budget} bytes: {least.name} needs least, {least.peak} bytes", least.peak
        )
    return min(fitting, key=lambda candidate: (candidate.flops, candidate.peak))


def rank_candidates(settings: MemorySettings, pipeline_rank: int = 0) -> list[Candidate]:
    """Nothing, the attention core, or the first k layers of each stage whole with nothing or the core of the rest."""
    ranges = settings.ranges()
    counts = {stage: ranges[stage][1] - ranges[stage][0] for stage in settings.stages(pipeline_rank)}
    found = []
    for whole in range(max(counts.values()) + 1):
        for rest in ("none", "selective"):
            own = {
                stage: ("full",) * min(whole, count) + (rest,) * max(count - whole, 0)
                for stage, count in counts.items()
            }
            policies = ["none"] * settings.config.num_layers
            for stage, chosen in own.items():
                policies[slice(*ranges[stage])] = chosen
            name = rest if whole == 0 else f"the first {whole} layers of each stage full, {rest} of the others"
            flops = sum(
                recomputed_flops(settings.config, settings.sequence_length, chosen, stops_early=False)
                for chosen in own.values()
            )
            peak = rank_memory(replace(settings, policies=tuple(policies)), pipeline_rank).peak
            found.append(Candidate(name, own, flops, peak))
    return found


def choose_recompute(settings: MemorySettings, budget: int) -> tuple[str, ...]:
    """What to recompute of each layer of the model, so that every rank's peak is at most ``budget`` bytes.

    Raises:
        BudgetError: a rank that nothing fits, with the smallest budget that fits them all.
    """
    ranges = settings.ranges()
    # Balanced once, not once a candidate.
    settings = replace(settings, layers_per_stage=tuple(stop - start for start, stop in ranges))
    ranks = 1 if settings.schedule is None else settings.schedule.ranks
    candidates = [rank_candidates(settings, rank) for rank in range(ranks)]
    needs = [min(candidate.peak for candidate in own) for own in candidates]
    if max(needs) > budget:
        rank = needs.index(max(needs))
        raise BudgetError(
            f"nothing that is recomputed brings a rank's peak to {budget} bytes: pipeline rank {rank} needs "
            f"{needs[rank]} at least",
            needs[rank],
        )
    policies = ["none"] * settings.config.num_layers
    for own in candidates:
        for stage, chosen in choose_policy(own, budget).policies.items():
            policies[slice(*ranges[stage])] = chosen
    return tuple(policies)
