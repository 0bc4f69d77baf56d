"""Sums brought to their owners and values to everyone, in place, over 1 to 4 ranks."""

import pytest
import torch
from ranks import run_ranks

from gridtron.core import Grid, Ledger
from gridtron.core.shares import share_of, start_gather_of_shares, start_sum_of_shares


def check(length, dtype):
    with Grid.create(data=-1) as grid:
        axis = grid.data
        mine = torch.arange(axis.size * length, dtype=dtype) * (axis.rank + 1)
        expected = torch.arange(axis.size * length, dtype=dtype) * sum(range(1, axis.size + 1))
        flats = [mine.clone(), 2 * mine]
        with Ledger(grid) as ledger:
            # Two at once, waited for in turn: messages of a pair keep their order.
            pending = [start_sum_of_shares(flat, axis) for flat in flats]
            for item in pending:
                item.wait()
        for factor, flat in enumerate(flats, 1):
            assert torch.equal(share_of(flat, axis, axis.rank), factor * share_of(expected, axis, axis.rank))
        start_gather_of_shares(flats[0], axis).wait()
        assert torch.equal(flats[0], expected)
        return ledger.bytes("data", "send")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sum_and_gather(world_size, dtype):
    for length in (0, 1, 7):
        sent = run_ranks(check, world_size, length, dtype)
        assert sent == [2 * (world_size - 1) * length * dtype.itemsize] * world_size
