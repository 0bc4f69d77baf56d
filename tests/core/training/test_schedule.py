"""The learning rate of a step."""

import math

import pytest

from gridtron.core.optim.config import LRScheduleConfig
from gridtron.core.optim.schedule import learning_rate, spans


def rates(config: LRScheduleConfig, total: int, base: float = 1.0) -> list[float]:
    return [learning_rate(step, config, base, total) for step in range(1, total + 1)]


def test_warmup_rises_from_zero_to_the_full_rate() -> None:
    found = rates(LRScheduleConfig("cosine", warmup_steps=4), 10, base=2.0)
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    assert found[4] < 2.0


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_last_step_has_the_lowest_rate(name: str) -> None:
    for warmup in (0, 3, 19):
        found = rates(LRScheduleConfig(name, warmup_steps=warmup, min_ratio=0.2), 20)
        assert found[-1] == pytest.approx(0.2)
        assert max(found) <= 1.0
        assert all(a >= b for a, b in zip(found[warmup:], found[warmup + 1 :], strict=False))


def test_cosine_is_half_way_in_the_middle() -> None:
    config = LRScheduleConfig("cosine", warmup_steps=10, min_ratio=0.1)
    assert learning_rate(60, config, 1.0, 110) == pytest.approx(0.55)
    assert learning_rate(35, config, 1.0, 110) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_decay_steps_end_before_the_run_does() -> None:
    found = rates(LRScheduleConfig("linear", decay_steps=5, min_ratio=0.0), 10)
    assert found == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def test_wsd_is_flat_and_then_falls_over_the_last_steps() -> None:
    found = rates(LRScheduleConfig("wsd", warmup_steps=2, decay_steps=4, min_ratio=0.0), 10)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])
    assert rates(LRScheduleConfig("wsd", min_ratio=0.0), 20)[-3:] == pytest.approx([1, 0.5, 0])


def test_constant_stays() -> None:
    assert rates(LRScheduleConfig("constant", warmup_steps=2), 5) == [0.5, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "decay"), [(9, None), (0, 9), (3, 4), (9, 9), (5, 0), (0, 0)])
def test_what_is_longer_than_the_run_is_cut_with_a_warning(name: str, warmup: int, decay: int | None) -> None:
    config = LRScheduleConfig(name, warmup_steps=warmup, decay_steps=decay)
    parts = spans(config, 5)
    assert parts.warmup + parts.decay <= 5
    cut = [warmup > 5, name != "constant" and decay is not None and decay > 5 - parts.warmup]
    assert len(parts.warnings) == sum(cut)
    assert all(0 < rate <= 1 for rate in rates(config, 5))
