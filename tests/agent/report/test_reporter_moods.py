"""A tracking server in a bad mood loses nothing that fits the queue, and gets nothing twice."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from mlflow.exceptions import MlflowException

from pollux_agent.bench.tracking import Mood, Tracking, tracking_server
from pollux_agent.report import MlflowReporter
from pollux_agent.report.client import connect, in_words, is_passing


@pytest.fixture
def tracking() -> Iterator[Tracking]:
    with tracking_server() as tracking:
        yield tracking


@pytest.mark.parametrize("mood", ["busy", "broken"])
def test_what_was_reported_in_bad_times_arrives_once_and_in_order(tracking: Tracking, mood: Mood) -> None:
    tracking.mood = mood
    reporter = MlflowReporter(tracking.url, "r", 1, flush_interval_s=0.05)
    for step in range(1200):
        reporter.metrics({"loss": step / 2}, step)
    until_s = time.monotonic() + 60
    while tracking.num_calls < 2:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    tracking.mood = "well"
    assert reporter.close(60)
    points = [(step, value) for name, step, value in tracking.points if name == "loss"]
    assert points == [(step, step / 2) for step in range(1200)]
    assert set(Counter(points).values()) == {1}


def test_a_server_that_never_answers_is_told_of_in_few_words(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    tracking.mood = "silent"
    with pytest.raises(MlflowException) as raised:
        connect(tracking.url, timeout_s=1).get_run("r")
    assert is_passing(raised.value)
    assert in_words(raised.value, tracking.url) == "no answer in time"
