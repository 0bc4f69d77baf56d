"""What follows from a Sharding holds for any rows: owners partition, sums reach all holders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridtron.core.sharding import Sharding, even_ranges, nonempty
from gridtron.models.heads import HeadSplit


@st.composite
def shardings(draw):
    length, ranks = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    rows = []
    for start, stop in even_ranges(length, ranks):
        # Each rank may hold more than its even share: overlaps, as KV heads have.
        first = draw(st.integers(0, start)) if start < stop else start
        last = draw(st.integers(stop, length)) if start < stop else stop
        rows.append(nonempty((first, last)))
    return Sharding((3, length), 1, tuple(rows))


@given(shardings())
def test_owners_partition_and_holders_agree(sharding):
    length, ranks = sharding.shape[1], len(sharding.rows)
    owned = [row for rank in range(ranks) for start, stop in sharding.owned(rank) for row in range(start, stop)]
    assert sorted(owned) == list(range(length))
    holders = [
        sum(any(start <= row < stop for start, stop in sharding.ranges(rank)) for rank in range(ranks))
        for row in range(length)
    ]
    shared = {row for start, stop in sharding.shared() for row in range(start, stop)}
    assert shared == {row for row, count in enumerate(holders) if count > 1}
    for rank in range(ranks):
        held = sum(stop - start for start, stop in sharding.ranges(rank))
        assert sharding.local_shape(rank) == (3, held)
        for (start, stop), (low, high) in sharding.local_slices(rank, ((0, length),)):
            assert stop - start == high - low and 0 <= low < high <= held


@given(st.integers(0, 100), st.integers(1, 12))
def test_even_ranges(length, parts):
    pieces = even_ranges(length, parts)
    sizes = [stop - start for start, stop in pieces]
    assert sum(sizes) == length and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_rows_that_leave_a_gap_or_cross():
    with pytest.raises(AssertionError, match="held by no rank"):
        Sharding((4,), 0, (((0, 2),), ((3, 4),)))
    with pytest.raises(AssertionError, match="out of order"):
        Sharding((4,), 0, (((2, 4), (0, 2)),))
    with pytest.raises(AssertionError, match="outside"):
        Sharding((4,), 0, (((0, 5),),))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_heads_find_their_keys(group, key_value, ranks):
    heads = group * key_value
    if ranks > heads:
        return
    split = HeadSplit.over(heads, key_value, ranks)
    for rank in range(ranks):
        held = [head for start, stop in split.key_value[rank] for head in range(start, stop)]
        query = [head for start, stop in split.query[rank] for head in range(start, stop)]
        reads = split.key_value_of(rank, group)
        assert [held[index] for index in reads] == [head // group for head in query]
        assert set(reads) == set(range(len(held)))
