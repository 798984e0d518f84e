"""SIGTERM as a flag, within the process that hears it."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from pollux_agent.torch.stopping import StopSignal

GRACE_S = 0.3


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_is_overdue_twice_where_no_step_looks_at_it() -> None:
    calls: list[bool] = []
    overdue = threading.Event()

    def called(late: bool) -> None:
        calls.append(late)
        if late:
            overdue.set()

    stop = StopSignal(GRACE_S, called)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.asked
    assert overdue.wait(60)
    assert calls[-1]


def test_who_has_taken_the_signal_over_is_not_reminded_of_an_earlier_one() -> None:
    calls: list[bool] = []
    StopSignal(GRACE_S, calls.append)
    os.kill(os.getpid(), signal.SIGTERM)
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    time.sleep(2 * GRACE_S)  # nothing is what is awaited
    assert (heard, calls) == ([], [])
