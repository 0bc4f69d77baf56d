"""Every number of a parameter lies in exactly one place, however rows and flat ranges cut it."""

import math
import random

import pytest
import torch

from gridtron.core.grid import Axis
from gridtron.core.pieces import Piece
from gridtron.core.sharding import Sharding, even_ranges, nonempty


def shardings():
    yield Sharding.whole((5, 7))
    yield Sharding.whole((6,))
    yield Sharding.whole(())
    for ranks in (2, 3):
        yield Sharding.split((7, 5), 0, ranks)
        yield Sharding.split((7, 5), 1, ranks)
        yield Sharding.split((3, 4, 5), 1, ranks)
        yield Sharding.split((2,), 0, ranks)
    yield Sharding((12, 3), 0, (((0, 2), (6, 8)), ((2, 6), (8, 12))))  # rows apart
    yield Sharding((3, 12), 1, (((0, 2), (6, 8)), ((2, 6), (8, 12))))
    yield Sharding((8, 3), 0, (((0, 4),), ((0, 4),), ((4, 8),)))  # rows held twice
    yield Sharding((3, 8), 1, (((0, 4),), ((2, 8),)))


def pieces(sharding, shards, generator):
    """What every rank of (axis, shards) updates, with cuts at random places."""
    ranks = len(sharding.rows) or 2
    for rank in range(ranks):
        numel = math.prod(sharding.local_shape(rank))
        edges = sorted(generator.choices(range(numel + 1), k=shards - 1))
        cuts = tuple(zip([0, *edges], [*edges, numel], strict=True))
        axis = Axis("tensor", ranks, rank, tuple(range(ranks)))
        for shard in range(shards):
            over = Axis("data", shards, shard, tuple(range(shards)))
            yield Piece(sharding, axis, cuts if shards > 1 else None, over)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("sharding", list(shardings()), ids=str)
def test_boxes_and_counts_cover_every_number(sharding, shards):
    generator = random.Random(3)
    whole = torch.arange(math.prod(sharding.shape)).view(sharding.shape)
    for _ in range(5):
        counted = torch.zeros_like(whole).flatten()
        held = torch.zeros_like(whole)
        for piece in pieces(sharding, shards, generator):
            part = piece.take_of_whole(whole)
            assert tuple(part.shape) == piece.shape
            flat = part.flatten()
            seen = 0
            for (offsets, sizes), (start, stop) in piece.boxes():
                box = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                assert torch.equal(flat[start:stop].view(sizes), box)
                held[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
                seen += stop - start
            assert seen == flat.numel()
            for start, stop in [(0, flat.numel())] if piece.counted() is None else piece.counted():
                counted[flat[start:stop]] += 1
        assert (counted == 1).all() and (held >= 1).all()


def test_a_flat_range_of_a_matrix_is_at_most_three_boxes():
    for start in range(30):
        for stop in range(start, 31):
            piece = Piece(Sharding.whole((6, 5)), cuts=((0, start), (start, stop)), shards=Axis("data", 2, 1, (0, 1)))
            assert len(piece.boxes()) <= 3


def test_even_cuts_may_be_empty():
    sharding = Sharding((2, 3), 0, tuple(nonempty(piece) for piece in even_ranges(2, 3)))
    piece = Piece(sharding, Axis("tensor", 3, 2, (0, 1, 2)), ((0, 0), (0, 0)), Axis("data", 2, 1, (0, 1)))
    assert piece.shape == (0,) and piece.boxes() == [] and piece.take_of_whole(torch.ones(2, 3)).numel() == 0
