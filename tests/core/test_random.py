"""Philox against Random123's published vectors; shards against the whole, to the bit."""

import math
import statistics

import pytest
import torch

from gridtron.core.random import counted_dropout, normal_, philox, random_key, signed, uniform_
from gridtron.core.sharding import Sharding, even_ranges, nonempty

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter, key, expected):
    words = philox([torch.tensor([word]) for word in counter], key[0] | key[1] << 32)
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("fill", [normal_, uniform_])
@pytest.mark.parametrize("shape", [(7,), (101, 13), (64, 48), (13, 101), (3, 5, 7), (40000, 3), (3, 40001), (70001,)])
def test_shards_are_rows_of_the_whole(fill, shape):
    whole = torch.empty(shape)
    fill(whole, 12345678901234567890, Sharding.whole(shape))
    for dim in range(len(shape)):
        for ranks in (2, 3, 4):
            sharding = Sharding(shape, dim, tuple(nonempty(piece) for piece in even_ranges(shape[dim], ranks)))
            for rank in range(ranks):
                local = torch.empty(sharding.local_shape(rank))
                fill(local, 12345678901234567890, sharding, rank)
                start, stop = even_ranges(shape[dim], ranks)[rank]
                assert torch.equal(local, whole.narrow(dim, start, stop - start))


def test_several_ranges_of_one_rank():
    sharding = Sharding((12, 5), 0, (((0, 4), (8, 12)), ((2, 9),)))
    whole = torch.empty(12, 5)
    normal_(whole, 7, Sharding.whole((12, 5)))
    local = torch.empty(8, 5)
    normal_(local, 7, sharding, 0)
    assert torch.equal(local, torch.cat([whole[:4], whole[8:]]))
    assert torch.equal(local.double(), _filled(torch.empty(8, 5, dtype=torch.float64), sharding))


def _filled(tensor, sharding):
    normal_(tensor, 7, sharding, 0)
    return tensor


def test_moments():
    values = torch.empty(1_000_003)
    normal_(values, random_key(0, "weights", "a"), Sharding.whole(values.shape))
    assert abs(values.mean()) < 5e-3 and abs(values.std() - 1) < 5e-3
    assert abs((values**3).mean()) < 2e-2 and abs((values**4).mean() - 3) < 5e-2
    uniform_(values, 3, Sharding.whole(values.shape), low=-2, high=2)
    assert values.min() >= -2 and values.max() < 2 and abs(values.mean()) < 1e-2


def test_keys_differ():
    names = [("0", "w", "a"), ("0", "w", "b"), ("0", "d", "a"), ("1", "w", "a")]
    assert len({random_key(int(seed), purpose, name) for seed, purpose, name in names}) == 4


@pytest.mark.parametrize(("hidden", "shift"), [(16, 0), (7, 0), (16, 3)])
def test_dropout_shards_are_the_whole(hidden, shift):
    """(sequence, batch, hidden): a shard of the sequence, of the hidden size, or of the batch draws the same mask."""
    sequence, batch = 12, 6
    x = torch.ones(sequence, batch, hidden, dtype=torch.float64)
    samples = torch.arange(batch) * 10 + shift + 2**33
    key = signed(random_key(0, "dropout", "site"))
    strides = [hidden, 0, 1]
    whole = counted_dropout(x, 0.3, key, samples, 1, [0, 0, 0], strides)
    assert 0.2 < (whole == 0).double().mean() < 0.4
    rows = counted_dropout(x[4:9], 0.3, key, samples, 1, [4, 0, 0], strides)
    assert torch.equal(rows, whole[4:9])
    columns = counted_dropout(x[..., 3:6], 0.3, key, samples, 1, [0, 0, 3], strides)
    assert torch.equal(columns, whole[..., 3:6])
    some = counted_dropout(x[:, 2:5], 0.3, key, samples[2:5], 1, [0, 0, 0], strides)
    assert torch.equal(some, whole[:, 2:5])
    first = counted_dropout(x.transpose(0, 1), 0.3, key, samples, 0, [0, 0, 0], [0, hidden, 1])
    assert torch.equal(first, whole.transpose(0, 1))


def test_dropout_rate_and_gradient():
    x = torch.randn(32, 8, 64, dtype=torch.float64, requires_grad=True)
    samples = torch.arange(8)
    out = counted_dropout(x, 0.25, 5, samples, 1, [0, 0, 0], [64, 0, 1])
    rate = (out == 0).double().mean()
    assert abs(rate - 0.25) < 5 * math.sqrt(0.25 * 0.75 / x.numel())
    out.sum().backward()
    assert torch.equal(x.grad, (out != 0).double() * (1 / 0.75))
    torch.library.opcheck(counted_dropout, (x, 0.25, 5, samples, 1, [0, 0, 0], [64, 0, 1]))


def test_dropout_of_nothing():
    assert counted_dropout(torch.ones(0, 2, 4), 0.5, 1, torch.arange(2), 1, [0, 0, 0], [4, 0, 1]).shape == (0, 2, 4)


def test_words_are_uniform_over_bits():
    words = philox([torch.arange(4096), *(torch.zeros(4096, dtype=torch.int64) for _ in range(3))], 99)
    for word in words:
        shares = [((word >> bit) & 1).double().mean().item() for bit in range(32)]
        assert min(shares) > 0.45 and max(shares) < 0.55 and abs(statistics.mean(shares) - 0.5) < 0.01
