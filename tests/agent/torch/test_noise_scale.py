"""The estimator's algebra and the smoothing, without torch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux_agent.torch.noise import NoiseSample, NoiseScale


def sample_of(gradients: np.ndarray, sizes: np.ndarray) -> NoiseSample:
    """What a step with these micro-batch gradients (n x d) tells."""
    mean = sizes @ gradients / sizes.sum()
    return NoiseSample(
        num_estimates=len(sizes),
        num_samples=float(sizes.sum()),
        weighted_sqr_sum=float(sizes @ (gradients**2).sum(axis=1)),
        mean_sqr=float(mean @ mean),
    )


def micro_batches(rng: np.random.Generator, sizes: np.ndarray, dim: int, var: float) -> np.ndarray:
    """Gradients with mean (1, 0, 0, ...) whose one-sample covariance has the trace ``var``."""
    truth = np.zeros(dim)
    truth[0] = 1.0
    return truth + rng.normal(size=(len(sizes), dim)) * np.sqrt(var / dim / sizes)[:, None]


@given(n=st.integers(2, 8), size=st.integers(1, 64), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_equal_sizes_give_the_published_estimator(n: int, size: int, seed: int) -> None:
    gradients = micro_batches(np.random.default_rng(seed), np.full(n, size), 10, 30.0)
    sample = sample_of(gradients, np.full(n, float(size)))
    small, big = (gradients**2).sum(axis=1).mean(), (gradients.mean(axis=0) ** 2).sum()
    b_small, b_big = size, n * size
    # McCandlish et al. 2018, appendix A.1, equations for |G|^2 and S
    want_sqr = (b_big * big - b_small * small) / (b_big - b_small)
    want_var = (small - big) / (1 / b_small - 1 / b_big)
    assert sample.grad_sqr() == pytest.approx(want_sqr, rel=1e-9, abs=1e-9)
    assert sample.grad_var() == pytest.approx(want_var, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("sizes", [[4, 4], [1, 7], [5, 3, 2], [16, 1, 1, 8]], ids=str)
def test_estimates_are_unbiased_for_unequal_sizes(sizes: list[int]) -> None:
    rng, counts = np.random.default_rng(0), np.array(sizes, dtype=float)
    samples = [sample_of(micro_batches(rng, counts, 20, 12.0), counts) for _ in range(20_000)]
    variances = np.array([sample.grad_var() for sample in samples])
    squares = np.array([sample.grad_sqr() for sample in samples])
    for values, want in ((variances, 12.0), (squares, 1.0)):
        assert abs(values.mean() - want) < 4 * values.std() / np.sqrt(len(values))


def test_unknown_before_the_first_estimate() -> None:
    noise = NoiseScale()
    assert noise.noise_scale is None and noise.grad_sqr is None and noise.grad_var is None


def test_the_first_estimate_counts_in_full_and_averages_are_of_numerator_and_denominator() -> None:
    noise = NoiseScale(smoothing=0.5)
    first = NoiseSample(num_estimates=2, num_samples=8, weighted_sqr_sum=24.0, mean_sqr=2.0)
    assert noise.update(first)
    assert (noise.grad_var, noise.grad_sqr) == (8.0, 1.0)
    assert noise.noise_scale == 8.0
    second = NoiseSample(num_estimates=2, num_samples=8, weighted_sqr_sum=28.0, mean_sqr=3.0)
    assert noise.update(second)
    var = (0.5 * 8.0 + 4.0) / 1.5
    sqr = (0.5 * 1.0 + 2.5) / 1.5
    assert noise.grad_var == pytest.approx(var)
    assert noise.noise_scale == pytest.approx(var / sqr)


@pytest.mark.parametrize(
    "sample",
    [
        NoiseSample(num_estimates=1, num_samples=8, weighted_sqr_sum=8.0, mean_sqr=1.0),
        NoiseSample(num_estimates=0, num_samples=0, weighted_sqr_sum=0.0, mean_sqr=0.0),
        NoiseSample(num_estimates=2, num_samples=8, weighted_sqr_sum=float("nan"), mean_sqr=1.0),
        NoiseSample(num_estimates=2, num_samples=8, weighted_sqr_sum=8.0, mean_sqr=float("inf")),
    ],
    ids=["one estimate", "none", "NaN", "inf"],
)
def test_what_holds_no_estimate_changes_nothing(sample: NoiseSample) -> None:
    noise = NoiseScale()
    noise.update(NoiseSample(num_estimates=2, num_samples=8, weighted_sqr_sum=24.0, mean_sqr=2.0))
    before = noise.state_dict()
    assert not noise.update(sample)
    assert noise.state_dict() == before


@given(
    st.lists(
        st.tuples(st.integers(2, 9), st.floats(1, 1e4), st.floats(0, 1e6), st.floats(0, 1e6)), max_size=30
    )
)
@settings(deadline=None, max_examples=100)
def test_phi_is_finite_and_not_negative_whatever_comes_in(
    figures: list[tuple[int, float, float, float]],
) -> None:
    noise = NoiseScale()
    for n, samples, weighted, mean in figures:
        noise.update(
            NoiseSample(num_estimates=n, num_samples=samples, weighted_sqr_sum=weighted, mean_sqr=mean)
        )
        phi = noise.noise_scale
        assert phi is None or (np.isfinite(phi) and phi >= 0)


def test_a_gradient_lost_in_noise_gives_the_largest_phi_that_the_window_can_show() -> None:
    noise = NoiseScale(smoothing=0.9)
    for _ in range(200):
        noise.update(NoiseSample(num_estimates=2, num_samples=8, weighted_sqr_sum=16.0, mean_sqr=1.0))
    assert noise.grad_sqr == 0.0
    assert noise.noise_scale == pytest.approx(10 * 8 / 0.1)


def test_state_comes_back() -> None:
    noise, other = NoiseScale(), NoiseScale()
    noise.update(NoiseSample(num_estimates=2, num_samples=8, weighted_sqr_sum=24.0, mean_sqr=2.0))
    other.load_state_dict(noise.state_dict())
    assert other.state_dict() == noise.state_dict()
    assert other.noise_scale == noise.noise_scale
