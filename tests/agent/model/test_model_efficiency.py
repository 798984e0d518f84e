"""Statistical efficiency against Pollux Eq. 7 and AdaScale's gain."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux_agent.model.efficiency import efficiency, gain, step_gain


def test_efficiency_by_hand() -> None:
    # phi = 300, M0 = 100: (300 + 100) / (300 + M)
    assert efficiency(300.0, 100, [100, 500, 900]) == pytest.approx([1.0, 0.5, 1 / 3])


def test_gain_is_adascales() -> None:
    """AdaScale (arXiv:2007.05105): (var + sqr) / (var / S + sqr), var at M0, with phi = M0 var / sqr."""
    variance, square, initial = 6.0, 2.0, 64
    scale = np.array([1.0, 4.0, 32.0])
    want = (variance + square) / (variance / scale + square)
    assert gain(initial * variance / square, initial, initial * scale) == pytest.approx(want)


def test_without_noise_larger_batches_teach_nothing_more() -> None:
    assert gain(0.0, 64, [64, 640]) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("noise", [inf, 1e308])
def test_with_endless_noise_every_sample_counts(noise: float) -> None:
    assert efficiency(noise, 64, [64, 640]) == pytest.approx([1.0, 1.0])
    assert gain(noise, 64, 640) == pytest.approx(10.0)
    assert step_gain(noise, 64, 640) == pytest.approx(10.0)


@given(
    noise=st.floats(0, 1e12),
    initial=st.integers(1, 10_000),
    factor=st.integers(1, 1000),
)
@settings(deadline=None, max_examples=100)
def test_gain_lies_between_one_and_the_batch_ratio(noise: float, initial: int, factor: int) -> None:
    value = float(gain(noise, initial, initial * factor))
    assert 1 - 1e-9 <= value <= factor * (1 + 1e-9)
    assert step_gain(noise, initial, initial * factor) == pytest.approx(value, rel=1e-12)
