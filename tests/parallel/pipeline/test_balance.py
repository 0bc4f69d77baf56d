"""The split of layers against every split there is."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridtron.parallel.pipeline.balance import balance


def every_split(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield list(itertools.pairwise((0, *cuts, layers)))


def dearest(costs, split, first=0, last=0):
    totals = [sum(costs[slice(*piece)]) for piece in split]
    totals[0] += first
    totals[-1] += last
    return max(totals)


whole = st.integers(0, 20)


@given(st.lists(whole, min_size=1, max_size=9), st.integers(1, 9), whole, whole)
def test_no_split_is_better_and_none_as_good_is_more_even(costs, stages, first, last):
    stages = min(stages, len(costs))
    split = balance(costs, stages, first, last)
    assert [start for start, _ in split] == [0, *(stop for _, stop in split[:-1])] and split[-1][1] == len(costs)

    def rank(candidate):
        counts = [stop - start for start, stop in candidate]
        return dearest(costs, candidate, first, last), sum(count**2 for count in counts), counts

    assert rank(split) == min(map(rank, every_split(len(costs), stages)))


@pytest.mark.parametrize("cost", [0.1, 1 / 3, 1e-9, 7e30])
def test_equal_layers_are_spread_evenly_whatever_the_rounding(cost):
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            counts = [stop - start for start, stop in balance([cost] * layers, stages)]
            assert counts == sorted(counts) and counts[-1] - counts[0] <= 1 and sum(counts) == layers


def test_a_dear_head_takes_layers_from_the_last_stage():
    assert balance([1.0] * 8, 4, last=2.0) == [(0, 2), (2, 4), (4, 7), (7, 8)]
    assert balance([1.0] * 8, 2, first=6.0) == [(0, 1), (1, 8)]
    assert balance([5, 1, 1, 1, 1, 1], 2) == [(0, 1), (1, 6)]
    assert balance([1], 1, 3, 4) == [(0, 1)]


def test_large():
    split = balance([12.7] * 512, 256, first=0.3, last=40.0)
    assert len(split) == 256 and split[-1] == (511, 512) and max(stop - start for start, stop in split) == 3


@pytest.mark.parametrize(
    ("costs", "stages", "words"),
    [
        ([1, 1, 1], 4, "stages=4 for 3 layers.*nearest: stages=3"),
        ([1, 1, 1], 0, "stages=0 for 3 layers.*nearest: stages=1"),
        ([1, -1], 1, "a cost of -1"),
        ([1, float("nan")], 1, "a cost of nan"),
        ([1, float("inf")], 1, "a cost of inf"),
    ],
)
def test_refused(costs, stages, words):
    with pytest.raises(ValueError, match=words):
        balance(costs, stages)


def test_needs_no_torch():
    code = "import sys, gridtron.parallel.pipeline.balance; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
