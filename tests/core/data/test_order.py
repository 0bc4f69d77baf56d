"""The keyed permutation: a bijection for every size, the same in pieces as whole, and no order that shows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridtron.core.data.order import permute


@pytest.mark.parametrize("size", range(1, 201))
def test_bijection_of_small_sizes(size):
    for key in (0, 1, 2**64 - 1):
        assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 2**40), key=st.integers(0, 2**64 - 1), seed=st.integers(0, 2**32 - 1))
def test_distinct_places_give_distinct_samples(size, key, seed):
    places = np.unique(np.random.default_rng(seed).integers(0, size, 500))
    samples = permute(places, size, key)
    assert samples.dtype == np.int64 and samples.min() >= 0 and samples.max() < size
    assert len(np.unique(samples)) == len(places)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(2, 5000), key=st.integers(0, 2**64 - 1))
def test_bijection_and_pieces(size, key):
    whole = permute(np.arange(size), size, key)
    assert np.array_equal(np.sort(whole), np.arange(size))
    cut = size // 2
    pieces = [permute(np.arange(cut), size, key), permute(np.arange(cut, size), size, key)]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_shape_is_kept():
    places = np.arange(24).reshape(2, 3, 4)
    assert np.array_equal(permute(places, 30, 5), permute(places.reshape(-1), 30, 5).reshape(2, 3, 4))


def test_looks_shuffled():
    """Means and correlations of 20,000 places stay within five standard errors of a random permutation's."""
    size = 20_000
    for key in range(5):
        order = permute(np.arange(size), size, key).astype(float)
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 5 / size**0.5
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / size**0.5
        assert abs(order[:1000].mean() / size - 0.5) < 5 * (1 / 12 / 1000) ** 0.5
        assert (order == np.arange(size)).sum() < 12


def test_keys_give_other_orders():
    orders = {tuple(permute(np.arange(50), 50, key).tolist()) for key in range(200)}
    assert len(orders) == 200


def test_all_orders_of_three_occur():
    orders = {tuple(permute(np.arange(3), 3, key * 0x9E3779B97F4A7C15 % 2**64).tolist()) for key in range(500)}
    assert len(orders) == 6
