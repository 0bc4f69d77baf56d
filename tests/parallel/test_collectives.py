"""Each conjugate pair, forward and backward, by its definition."""

import pytest
import torch
from ranks import run_ranks

from gridtron.core import Grid
from gridtron.parallel import collectives


def whole(rank, rows):
    return torch.arange(rows * 2, dtype=torch.float64).view(rows, 2) * (rank + 1) + rank


def check_pairs(size):
    with Grid.create(tensor=-1) as grid:
        axis, rank = grid.tensor, grid.tensor.rank
        rows = 2 * size
        total = sum(whole(r, rows) for r in range(size))
        own = slice(2 * rank, 2 * rank + 2)
        every = torch.cat([whole(r, 2) for r in range(size)])
        cases = {
            # name: (this rank's input, output, output's gradient, input's gradient)
            "copy_to_region": (whole(rank, rows), whole(rank, rows), whole(rank, rows), total),
            "reduce_from_region": (whole(rank, rows), total, whole(rank, rows), whole(rank, rows)),
            "gather_from_sequence": (whole(rank, 2), every, whole(rank, rows), total[own]),
            "reduce_scatter_to_sequence": (whole(rank, rows), total[own], whole(rank, 2), every),
            "scatter_to_sequence": (whole(0, rows), whole(0, rows)[own], whole(rank, 2), every),
        }
        for name, (x, output, gradient, expected) in cases.items():
            x = x.clone().requires_grad_()
            before = x.detach().clone()
            y = getattr(collectives, name)(x, axis)
            assert torch.equal(y, output), name
            y.backward(gradient)
            assert torch.equal(x.grad, expected), name
            assert torch.equal(x.detach(), before), f"{name} changed its input"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pairs(size):
    run_ranks(check_pairs, size, size)


def check_uneven_regions():
    with Grid.create(tensor=-1) as grid:
        axis = grid.tensor
        x = whole(0, 5).t().contiguous().requires_grad_()
        share = collectives.scatter_to_region(x, axis)
        lengths = (2, 2, 1)
        assert torch.equal(share, x[:, sum(lengths[: axis.rank]) : sum(lengths[: axis.rank + 1])])
        y = collectives.gather_from_region(share, axis, -1, lengths)
        assert torch.equal(y, x)
        y.backward(whole(3, 5).t())
        assert torch.equal(x.grad, whole(3, 5).t())


def test_uneven_regions():
    run_ranks(check_uneven_regions, 3)
