"""Ratios of alternating runs on machines that drift or stutter."""

from collections.abc import Callable
from itertools import count

import pytest

from pollux_agent.bench.pairs import Ratios, alternate


def measured(speed: Callable[[int], float], *, pairs: int = 5, most_pairs: int = 15) -> Ratios:
    """On a machine whose ``speed`` depends on the run's number; a ``slow`` run lasts 1.05 times as long."""
    numbers = count()
    return alternate(
        lambda mode: (1.05 if mode == "slow" else 1.0) * speed(next(numbers)),
        "plain",
        ("slow",),
        pairs=pairs,
        most_pairs=most_pairs,
        told=lambda line: None,
    )


def test_a_steady_drift_of_the_machine_cancels() -> None:
    ratios = measured(lambda number: 40.0 + 0.1 * number)
    assert ratios.medians["slow"] == pytest.approx(1.05, rel=1e-9)
    assert (ratios.num_pairs, ratios.too_noisy) == (5, False)


def test_a_machine_that_stutters_is_measured_to_the_most_and_said_to_be_too_noisy() -> None:
    ratios = measured(lambda number: 40.0 if number % 3 else 44.0 + number)
    assert (ratios.num_pairs, ratios.too_noisy) == (15, True)
