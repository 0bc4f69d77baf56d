"""Angles of rotary positions: known values of each kind of scaling."""

import math
from dataclasses import replace

import pytest
import torch

from gridtron.models import GPTConfig
from gridtron.models.rotary import rotary_frequencies, rotary_tables

BASE = GPTConfig(num_attention_heads=4, head_dim=64, hidden_size=256, max_position_embeddings=8192, rope_theta=500000.0)


def plain(config):
    return torch.tensor([config.rope_theta ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)


def scaled(**scaling):
    return replace(BASE, rope_scaling=scaling)


def test_plain_and_linear():
    frequencies, factor = rotary_frequencies(BASE, 16)
    assert torch.allclose(frequencies, plain(BASE), rtol=1e-14) and factor == 1.0
    frequencies, _ = rotary_frequencies(scaled(type="linear", factor=8.0), 16)
    assert torch.allclose(frequencies, plain(BASE) / 8, rtol=1e-14)


def test_llama3_keeps_short_and_slows_long_wavelengths():
    kind = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    frequencies, _ = rotary_frequencies(scaled(rope_type="llama3", factor=8.0, **kind), 16)
    for own, base in zip(frequencies.tolist(), plain(BASE).tolist(), strict=True):
        wavelength = 2 * math.pi / base
        if wavelength < 8192 / 4:
            assert own == pytest.approx(base, rel=1e-14)
        elif wavelength > 8192 / 1:
            assert own == pytest.approx(base / 8, rel=1e-14)
        else:
            smooth = (8192 / wavelength - 1) / 3
            assert own == pytest.approx((1 - smooth) * base / 8 + smooth * base, rel=1e-12)


def test_dynamic_begins_beyond_the_trained_length():
    config = scaled(type="dynamic", factor=2.0)
    assert torch.allclose(rotary_frequencies(config, 8192)[0], plain(BASE), rtol=1e-14)
    theta = 500000.0 * (2 * 16384 / 8192 - 1) ** (64 / 62)
    expected = torch.tensor([theta ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    assert torch.allclose(rotary_frequencies(config, 16384)[0], expected, rtol=1e-12)


def test_yarn_interpolates_between_its_two_bounds():
    config = scaled(type="yarn", factor=4.0, original_max_position_embeddings=2048)
    frequencies, factor = rotary_frequencies(config, 16)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    base = plain(BASE)
    ratio = frequencies / base
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(0.25)
    assert torch.all(ratio.diff() <= 1e-15), "each pair is slowed at least as much as the one before"


def test_tables_are_exact_at_long_range():
    cos, sin = rotary_tables(BASE, 100_000, torch.float64, torch.device("cpu"))
    position = 99_999
    for pair in (0, 1, 31):
        angle = position * BASE.rope_theta ** (-2 * pair / 64)
        assert cos[position, pair] == pytest.approx(math.cos(angle), abs=1e-9)
        assert sin[position, pair] == pytest.approx(math.sin(angle), abs=1e-9)
