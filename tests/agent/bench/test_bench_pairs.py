"""Ratios of runs that race each other on machines that drift or stutter."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest

from pollux_agent.bench.competitor import Competitor
from pollux_agent.bench.pairs import Ratios, compare
from pollux_agent.errors import PolluxAgentError


def measured(speed: Callable[[int], float], *, pairs: int = 5, most_pairs: int = 15) -> Ratios:
    """On a machine whose ``speed`` depends on the run's number; a ``slow`` run lasts 1.05 times as long."""
    numbers = count()

    def race(modes: Sequence[str]) -> list[float]:
        return [(1.05 if mode == "slow" else 1.0) * speed(next(numbers)) for mode in modes]

    return compare(race, "plain", ("slow",), pairs=pairs, most_pairs=most_pairs, told=lambda line: None)


def test_a_steady_drift_of_the_machine_cancels() -> None:
    ratios = measured(lambda number: 40.0 + 0.1 * number)
    assert ratios.medians["slow"] == pytest.approx(1.05, rel=1e-9)
    assert (ratios.num_pairs, ratios.too_noisy) == (5, False)


def test_a_machine_that_stutters_is_measured_to_the_most_and_said_to_be_too_noisy() -> None:
    one_round_up_the_next_down = [40.0, 44.0, 48.0, 48.0, 44.0, 40.0]
    ratios = measured(lambda number: one_round_up_the_next_down[number % 6])
    assert (ratios.num_pairs, ratios.too_noisy) == (15, True)


ANSWERS = """
print("ready", flush=True)
while True:
    print(int(input()) / 8, flush=True)
"""


def test_a_competitor_runs_in_its_turns_and_is_stopped_between_them(tmp_path: Path) -> None:
    with Competitor("two ranks", [sys.executable, "-c", ANSWERS], [{}, {}], tmp_path) as competitor:
        assert [competitor.turn(4), competitor.turn(16)] == [0.5, 2.0]
        for rank in competitor._ranks:
            assert os.WIFSTOPPED(os.waitpid(rank.pid, os.WUNTRACED)[1])
    assert [rank.poll() for rank in competitor._ranks] == [-signal.SIGKILL] * 2


def test_a_competitor_that_ends_says_what_it_wrote(tmp_path: Path) -> None:
    script = "print('ready', flush=True); input(); raise SystemExit('out of luck')"
    with Competitor("the agent", [sys.executable, "-c", script], [{}], tmp_path) as competitor:
        with pytest.raises(PolluxAgentError, match="the agent failed: out of luck"):
            competitor.turn(4)
