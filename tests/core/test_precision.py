"""Number formats, and the loss scale: searched, bounded, saved."""

import math
import random

import pytest
import torch

from gridtron.core.precision import (
    HIGHEST_SCALE,
    LossScaler,
    PrecisionConfig,
    loss_scale_fault,
    parameter_dtype,
    searches_scale,
    wide_dtype,
)


@pytest.mark.parametrize(
    ("mode", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("auto", torch.float32)]
)
def test_narrow_formats_have_float32_beside_them(mode: str, dtype: torch.dtype) -> None:
    found = parameter_dtype(mode, torch.device("cpu"))
    assert found == dtype and wide_dtype(found) == torch.float32


def trace(scaler: LossScaler, applied: str) -> list[float]:
    """The scale after each step of a word: "." for one that was applied, "x" for an overflow."""
    scales = []
    for step in applied:
        scaler.update(step == ".")
        scales.append(scaler.scale)
    return scales


def test_it_halves_at_an_overflow_and_doubles_after_good_steps() -> None:
    scaler = LossScaler(16, interval=3)
    assert trace(scaler, "..x...xx......") == [16, 16, 8, 8, 8, 16, 8, 4, 4, 4, 8, 8, 8, 16]
    assert scaler.skipped == 3 and scaler.good_steps == 0


def test_it_stays_between_bounds_and_a_power_of_two() -> None:
    assert trace(LossScaler(4, interval=1), "xxxx")[-2:] == [1, 1]
    assert trace(LossScaler(HIGHEST_SCALE, interval=1), "..") == [HIGHEST_SCALE] * 2
    generator, scaler = random.Random(0), LossScaler(interval=2)
    for _ in range(500):
        scaler.update(generator.random() < 0.6)
        assert loss_scale_fault(scaler.scale) is None
        assert 1 / (1 / scaler.scale) == scaler.scale


def test_a_constant_scale_counts_and_stays() -> None:
    scaler = LossScaler(256, interval=0)
    assert trace(scaler, "x" * 3 + "." * 5000) == [256] * 5003
    assert scaler.skipped == 3


@pytest.mark.parametrize(
    ("scale", "nearest"), [(1000, 1024), (0.25, 1), (2.0**40, 2**32), (3e4, 32768), (math.inf, 2**32), (-8, 1)]
)
def test_another_scale_is_refused_with_the_nearest(scale: float, nearest: int) -> None:
    with pytest.raises(ValueError, match=rf"scale=.*power of two.*nearest: {nearest}$"):
        LossScaler(scale)


def test_a_run_has_one_in_float16_alone() -> None:
    scaler = LossScaler.of(PrecisionConfig("fp16", 1024, 5))
    assert scaler is not None and (scaler.scale, scaler.interval) == (1024, 5)
    assert all(LossScaler.of(PrecisionConfig(mode)) is None for mode in ("auto", "fp32", "bf16", "fp64"))
    assert searches_scale(PrecisionConfig("fp16")) and not searches_scale(PrecisionConfig("fp16", 1024, 0))
    assert not searches_scale(PrecisionConfig("fp32"))


@pytest.mark.case(35)
@pytest.mark.parametrize("stop", range(0, 12, 3))
def test_a_restored_one_goes_on_as_if_it_had_never_stopped(stop: int) -> None:
    word = "..x..." + "x.....xx.."
    whole, first = LossScaler(64, 3), LossScaler(64, 3)
    expected = trace(whole, word)
    trace(first, word[:stop])
    saved = {name: tensor.clone() for name, tensor in first.states().items()}
    assert all(tensor.dtype == torch.float64 and tensor.ndim == 0 for tensor in saved.values())
    again = LossScaler(64, 3)
    for name, tensor in again.states().items():
        tensor.copy_(saved[name])
    again.take_states()
    assert (again.scale, again.good_steps, again.skipped) == (first.scale, first.good_steps, first.skipped)
    assert trace(again, word[stop:]) == expected[stop:]
    assert (again.good_steps, again.skipped) == (whole.good_steps, whole.skipped)


@pytest.mark.case(29)
def test_copies_that_hear_the_same_agree() -> None:
    """One fact a step is all that a scaler sees, so ranks that agree on it cannot drift apart."""
    copies = [LossScaler(32, 2) for _ in range(4)]
    generator = random.Random(1)
    for _ in range(100):
        applied = generator.random() < 0.7
        for scaler in copies:
            scaler.update(applied)
        assert len({(scaler.scale, scaler.good_steps, scaler.skipped) for scaler in copies}) == 1


def test_scaling_by_a_power_of_two_changes_no_digit() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8, requires_grad=True)
    found = []
    for scale in (1.0, 2.0**16):
        ((torch.randn(4, 8, generator=torch.Generator().manual_seed(1)) @ weight).square().sum() * scale).backward()
        assert weight.grad is not None
        found.append(weight.grad / scale)
        weight.grad = None
    assert torch.equal(*found)
