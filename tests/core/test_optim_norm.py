"""Norms count every number once, however tensor ranks hold rows and data ranks cut them."""

import math
import random
from collections.abc import Iterator

import pytest
import torch
from ranks import run_ranks

from gridtron.core import Grid
from gridtron.core.grid import Axis
from gridtron.core.optim.norm import Held, clip_, gradient_norm, norms_by_layer, norms_by_name
from gridtron.core.pieces import Piece
from gridtron.core.sharding import Sharding, even_ranges

ONE = Axis("data")


def shardings(ranks: int) -> dict[str, Sharding]:
    shared = (((0, 4),), ((2, 8),)) if ranks == 2 else (((0, 8),),)
    return {
        "norm": Sharding.whole((7,)),
        "scalar": Sharding.whole(()),
        "column": Sharding.split((7, 5), 0, ranks),
        "row": Sharding.split((3, 5), 1, ranks),
        "heads": Sharding((8, 3), 0, shared),
        "absent": Sharding.whole((3,)),
    }


def pieces(grid: Grid, cut: bool) -> Iterator[tuple[str, Piece]]:
    generator = random.Random(1)
    for name, sharding in shardings(grid.tensor.size).items():
        numel = math.prod(sharding.local_shape(grid.tensor.rank))
        cuts = tuple(even_ranges(numel, grid.data.size)) if cut and generator.random() < 0.8 else None
        yield name, Piece(sharding, grid.tensor, cuts, grid.data if cuts else ONE)


def wholes() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {name: torch.randn(sharding.shape).double() for name, sharding in shardings(1).items()}
    del found["absent"]
    return found


def check_norms(sizes: dict[str, int], cut: bool) -> tuple[float, dict[str, float]]:
    with Grid.create(**sizes) as grid:
        whole = wholes()
        held = {n: Held(p.take_of_whole(whole[n]), p) for n, p in pieces(grid, cut) if n in whole}
        names = [*shardings(1), "elsewhere"]
        shards = grid.data if cut else None
        total = gradient_norm(list(held.values()), [grid.tensor, grid.pipeline], shards=shards)
        assert total.dtype == torch.float64
        return float(total), norms_by_name(held, names, [grid.tensor, grid.pipeline], shards=shards)


@pytest.mark.case(28)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 3}, {"tensor": 2, "data": 1}, {"tensor": 2, "data": 2}])
def test_norms_are_those_of_one_process(sizes: dict[str, int], cut: bool) -> None:
    expected = {name: float(tensor.norm()) for name, tensor in wholes().items()} | {"absent": 0.0, "elsewhere": 0.0}
    results = run_ranks(check_norms, math.prod(sizes.values()), sizes, cut)
    for total, norms in results:
        assert norms == pytest.approx(expected, rel=1e-14)
        assert total == pytest.approx(math.hypot(*expected.values()), rel=1e-14)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_shows_by_name(bad: float) -> None:
    held = {name: Held(torch.ones(3), Piece(Sharding.whole((3,)))) for name in ("a", "b")}
    held["b"].gradient[1] = bad
    norms = norms_by_name(held, ["a", "b"], [])
    assert norms["a"] == pytest.approx(math.sqrt(3)) and not math.isfinite(norms["b"])
    assert not math.isfinite(gradient_norm(list(held.values()), []))


@pytest.mark.parametrize(("limit", "expected"), [(100.0, 1.5), (3.0, 1.5), (1.5, 0.75)])
def test_clipping_is_at_the_norm(limit: float, expected: float) -> None:
    held = [Held(torch.full((4,), 1.5), Piece(Sharding.whole((4,))))]
    clip_(held, gradient_norm(held, []), limit)
    assert torch.equal(held[0].gradient, torch.full((4,), expected))


def test_norms_of_layers():
    norms = {
        "embedding.weight": 1.0,
        "blocks.0.norm.weight": 3.0,
        "blocks.0.mlp.up.weight": 4.0,
        "blocks.10.a": 2.0,
        "w": 5.0,
    }
    assert norms_by_layer(norms) == {"embedding": 1.0, "blocks.0": 5.0, "blocks.10": 2.0, "w": 5.0}
