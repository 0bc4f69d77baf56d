"""Which layers a stage has, and which stages a process holds: numbers alone, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from gridtron.models.config import GPTConfig
from gridtron.models.cost.split import split_costs
from gridtron.parallel.pipeline.balance import balance
from gridtron.parallel.pipeline.families.family import loop


def layer_ranges(
    config: GPTConfig,
    num_stages: int,
    layers_per_stage: Sequence[int] | None = None,
    sequence_length: int | None = None,
) -> list[tuple[int, int]]:
    """(start, stop) of each stage's decoder layers: every layer once, none left over, none made up.

    Args:
        config: its shape, with vocab_size.
        num_stages: how many.
        layers_per_stage: how many layers each gets; default: balanced by cost, with the embedding's on the first
            stage and those of head and loss on the last.
        sequence_length: that the costs are reckoned at; default: config.max_position_embeddings.

    Raises:
        ValueError: counts that are not one for each stage, at least 1 and in sum all layers; more stages than layers.
    """
    layers = config.num_layers
    if layers_per_stage is not None:
        if fault := counts_fault(layers_per_stage, num_stages, layers):
            raise ValueError(fault)
        return list(pairwise([0, *accumulate(layers_per_stage)]))
    if not 1 <= num_stages <= layers:
        raise ValueError(
            f"num_stages={num_stages} for num_layers={layers}: each stage holds at least one layer; "
            f"nearest: num_stages={min(max(num_stages, 1), layers)}"
        )
    costs = split_costs(config, sequence_length or config.max_position_embeddings)
    return balance(costs.layers, num_stages, costs.embedding, costs.head)


def counts_fault(counts: Sequence[int], num_stages: int, num_layers: int) -> str | None:
    """Why ``layers_per_stage`` does not fit; None where it does."""
    shown = f"layers_per_stage=[{','.join(map(str, counts))}]"
    if len(counts) != num_stages:
        return f"{shown} has {len(counts)} counts and there are {num_stages} stages; give one for each"
    if min(counts) < 1:
        return f"{shown}: each stage holds at least one layer; raise the {min(counts)}"
    if sum(counts) != num_layers:
        # The nearest that fits: the difference goes to the stages that have the most (or, to add, the fewest).
        nearest = list(counts)
        while (left := num_layers - sum(nearest)) and num_layers >= num_stages:
            place = nearest.index(min(nearest) if left > 0 else max(nearest))
            nearest[place] += 1 if left > 0 else -1
        hint = f"; nearest: [{','.join(map(str, nearest))}]" if sum(nearest) == num_layers else ""
        return f"{shown} is {sum(counts)} layers in sum and num_layers={num_layers}{hint}"
    return None


def default_placement(num_stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of each stage, in turn: one a rank, and with several chunks the loop of Narayanan et al. 2021,
    section 2.2.

    Raises:
        ValueError: stages that do not divide over the ranks.
    """
    if num_stages % ranks:
        lower = num_stages // ranks * ranks
        near = f"{lower} or {lower + ranks}" if lower else f"{ranks}"
        raise ValueError(
            f"num_stages={num_stages} does not divide over pipeline={ranks}; nearest: num_stages={near}, or say by "
            "placement= which rank holds which stage"
        )
    return loop(ranks, num_stages // ranks)
