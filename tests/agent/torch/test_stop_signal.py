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


def test_a_reminder_that_is_not_heard_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes as the main thread begins to wait in a system call is not heard until that is over."""
    sent, calls = [], []
    send = signal.pthread_kill

    def lose_the_first(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            send(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", lose_the_first)
    overdue = threading.Event()
    StopSignal(30.0, lambda late: (calls.append(late), overdue.set()))  # type: ignore[func-returns-value]
    monkeypatch.setattr("pollux_agent.torch.stopping.OVERDUE_SHARE", 0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert overdue.wait(10)
    assert (calls, len(sent)) == ([False], 2)


def test_who_has_taken_the_signal_over_is_not_reminded_of_an_earlier_one() -> None:
    calls: list[bool] = []
    StopSignal(GRACE_S, calls.append)
    os.kill(os.getpid(), signal.SIGTERM)
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    time.sleep(2 * GRACE_S)  # nothing is what is awaited
    assert (heard, calls) == ([], [])
