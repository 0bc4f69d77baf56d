"""The cheapest recomputation within a budget: of every choice, and rank by rank."""

from dataclasses import replace

import pytest
from parity import LLAMA

from gridtron.models.cost.choice import BudgetError, Candidate, choose_policy, choose_recompute, rank_candidates
from gridtron.models.cost.flops import recomputed_flops
from gridtron.models.cost.memory import MemorySettings, rank_memory
from gridtron.parallel.pipeline import build_schedule

CONFIG = replace(LLAMA, num_layers=8, hidden_size=64, head_dim=16, ffn_hidden_size=160, attention_dropout=0.1)


def test_the_cheapest_that_fits():
    named = [
        Candidate(name, {}, flops, peak) for name, flops, peak in (("a", 0, 9), ("b", 3, 5), ("c", 3, 4), ("d", 7, 2))
    ]
    assert [choose_policy(named, budget).name for budget in (20, 9, 8, 4, 3, 2)] == ["a", "a", "c", "c", "d", "d"]
    with pytest.raises(BudgetError, match="no recomputation fits 1 bytes: d needs least, 2 bytes") as caught:
        choose_policy(named, 1)
    assert caught.value.need == 2


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved_1f1b"])
def test_every_rank_fits_and_none_recomputes_more_than_it_must(name):
    """Over budgets from the least to the most that is needed: early ranks, which hold more microbatches, recompute
    more; with all memory in the world nobody does."""
    schedule = build_schedule(name, 4, 8)
    settings = MemorySettings(CONFIG, 64, 4, schedule=schedule)
    ranges = settings.ranges()
    peaks = [candidate.peak for rank in range(4) for candidate in rank_candidates(settings, rank)]
    least = max(min(candidate.peak for candidate in rank_candidates(settings, rank)) for rank in range(4))
    with pytest.raises(BudgetError, match=f"needs {least} at least"):
        choose_recompute(settings, least - 1)
    for budget in range(least, max(peaks) + 1, (max(peaks) - least) // 7):
        policies = choose_recompute(settings, budget)
        chosen = replace(settings, policies=policies)
        for rank in range(4):
            assert rank_memory(chosen, rank).peak <= budget
            own = [policy for stage in schedule.stages(rank) for policy in policies[slice(*ranges[stage])]]
            cheaper = [
                candidate
                for candidate in rank_candidates(settings, rank)
                if candidate.flops < recomputed_flops(CONFIG, 64, own, stops_early=False)
            ]
            assert all(candidate.peak > budget for candidate in cheaper)
    assert set(choose_recompute(settings, max(peaks))) == {"none"}


def test_early_ranks_of_1f1b_recompute_more():
    settings = MemorySettings(CONFIG, 64, 4, schedule=build_schedule("1f1b", 4, 8))
    candidates = [rank_candidates(settings, rank) for rank in range(4)]
    budget = max(candidate.peak for candidate in candidates[3])
    policies = choose_recompute(settings, budget)
    ranges = settings.ranges()
    costs = [recomputed_flops(CONFIG, 64, policies[start:stop]) for start, stop in ranges]
    assert costs[0] > costs[3] == 0 and costs == sorted(costs, reverse=True)
