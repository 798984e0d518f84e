"""The goodput counter-example, against the figures published with it."""

import pytest

from pollux.report.counterexample import fastest, loss_floor, table, train


def test_without_noise_the_larger_batch_has_more_throughput_and_takes_longer() -> None:
    small, large = train(64, 0.0), train(1024, 0.0)
    assert small.updates == large.updates == 15
    assert (small.examples, large.examples) == (960, 15360)
    assert small.seconds == pytest.approx(0.246, abs=5e-4)
    assert large.seconds == pytest.approx(1.686, abs=5e-4)
    assert small.examples_per_s == pytest.approx(3902, abs=1)
    assert large.examples_per_s == pytest.approx(9110, abs=1)


@pytest.mark.parametrize(
    ("sigma", "batch", "seconds"), [(0.0, 16, 0.1740), (0.2, 32, 0.2508), (0.8, 512, 1.1628)]
)
def test_the_best_batch_grows_with_the_noise(sigma: float, batch: int, seconds: float) -> None:
    best = fastest(table(), sigma)
    assert best.batch_size == batch
    assert best.seconds == pytest.approx(seconds, abs=5e-5)


def test_what_cannot_reach_the_target_is_kept_and_marked() -> None:
    assert loss_floor(16, 0.8) == pytest.approx(0.8**2 / (14 * 16))
    outcomes = [outcome for outcome in table() if outcome.sigma == 0.8]
    assert [outcome.batch_size for outcome in outcomes if outcome.seconds is None] == [16, 32, 64, 128, 256]
