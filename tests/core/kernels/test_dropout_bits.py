"""Triton's dropout masks are those of core.random to the bit: whole, in shards, of attention, in every rank."""

import pytest
import torch

from gridtron.core import random
from gridtron.core.kernels.dropout_add import counted_dropout, dropout_add
from gridtron.core.random import random_key, signed

pytestmark = pytest.mark.usefixtures("interpreter")
KEY = signed(random_key(0, "dropout", "site"))

# (shape, sample_dim, offsets, strides); the last dimension shared by counters of four, and not.
CASES = [
    ((12, 6, 16), 1, [0, 0, 0], [16, 0, 1]),
    ((12, 6, 7), 1, [0, 0, 0], [7, 0, 1]),
    ((5, 6, 16), 1, [4, 0, 0], [16, 0, 1]),
    ((12, 6, 3), 1, [0, 0, 3], [16, 0, 1]),
    ((12, 6, 4), 1, [0, 0, 8], [16, 0, 1]),
    ((12, 6, 4), 1, [0, 0, 6], [16, 0, 1]),
    ((6, 12, 16), 0, [0, 0, 0], [0, 16, 1]),
    ((6, 3, 8, 8), 0, [0, 2, 0, 0], [0, 64, 8, 1]),
    ((6, 3, 5, 9), 0, [0, 2, 0, 0], [0, 45, 9, 1]),
    ((12, 16, 6), 2, [0, 0, 0], [16, 1, 0]),
    ((6, 9), 0, [0, 3], [0, 1]),
    ((6,), 0, [0], [0]),
    ((3, 6, 8), 1, [2**31, 0, 0], [2**20, 0, 1]),
]


@pytest.mark.parametrize(("shape", "sample_dim", "offsets", "strides"), CASES, ids=str)
@pytest.mark.parametrize("key", [KEY, 5, 2**31, -1])
def test_masks(shape, sample_dim, offsets, strides, key):
    x = torch.ones(shape, dtype=torch.float64)
    samples = torch.arange(shape[sample_dim]) * 10 + 2**33 - 3
    place = (0.3, key, samples, sample_dim, offsets, strides)
    assert torch.equal(counted_dropout(x, *place, backend="triton"), random.counted_dropout(x, *place))


@pytest.mark.parametrize("p", [0.0, 2.0**-32, 0.5, 1 - 2.0**-31])
def test_every_probability(p):
    x = torch.randn(4, 3, 8).to(torch.bfloat16)
    place = (p, KEY, torch.arange(3), 1, [0, 0, 0], [8, 0, 1])
    assert torch.equal(counted_dropout(x, *place, backend="triton"), random.counted_dropout(x, *place))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_sum_and_gradients_are_those_of_the_parts(dtype, backend):
    x, residual, given = (torch.randn(6, 3, 16).to(dtype) for _ in range(3))
    x, residual = x.transpose(0, 1).requires_grad_(), residual.transpose(0, 1).requires_grad_()
    given = given.transpose(0, 1)
    place = (0.3, KEY, torch.arange(3), 0, [0, 0, 0], [0, 16, 1])
    y = dropout_add(x, residual, *place, backend=backend)
    grads = torch.autograd.grad(y, (x, residual), given)
    assert torch.equal(y, random.counted_dropout(x, *place) + residual)
    assert torch.equal(grads[0], random.counted_dropout(given, *place)) and torch.equal(grads[1], given)
