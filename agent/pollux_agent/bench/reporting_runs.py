"""Steps of real arithmetic with and without reports, against a tracking server of a given mood."""

import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pollux_agent.bench.tracking import Mood
from pollux_agent.report import NullReporter, Reporter, ReporterApart

MOODS: tuple[Mood, ...] = ("well", "slow", "busy", "broken", "silent")
_SIZE = 300_000
_NUM_FIGURES = 5
_CLOSE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Medians over pairs; ``sent`` figures in all, of which ``lost`` never came and ``twice`` came again."""

    p99_added_ms: float
    total_ratio: float
    sent: int
    lost: int
    twice: int


def compare(mood: Mood, *, seconds: float, pairs: int) -> Compared:
    """Runs with reports to a server in this mood, each beside one without; the server is well at the end."""
    added, ratios = [], []
    sent = lost = twice = 0
    num_steps = max(1, round(seconds / statistics.median(_steps(50, NullReporter()))))
    for number in range(pairs):
        with _server(mood) as server:
            reporter = ReporterApart(server.url, "r", 1)
            if number % 2:
                silent, told = _steps(num_steps, NullReporter()), _steps(num_steps, reporter)
            else:
                told, silent = _steps(num_steps, reporter), _steps(num_steps, NullReporter())
            added.append(1000 * (_p99(told) - _p99(silent)))
            ratios.append(sum(told) / sum(silent))
            arrived = server.arrived_after(reporter)
            sent += num_steps * _NUM_FIGURES
            lost += num_steps * _NUM_FIGURES - len(arrived)
            twice += sum(count - 1 for count in arrived.values())
    return Compared(
        p99_added_ms=statistics.median(added),
        total_ratio=statistics.median(ratios),
        sent=sent,
        lost=lost,
        twice=twice,
    )


def _steps(count: int, reporter: Reporter) -> list[float]:
    """Seconds of each step: some milliseconds of arithmetic on one core, and five figures reported."""
    inputs = np.random.default_rng(0).standard_normal(_SIZE)
    names = [f"figure_{number}" for number in range(_NUM_FIGURES)]
    took = []
    for step in range(count):
        begin_s = time.perf_counter()
        for _ in range(4):
            np.sin(inputs).sum()
        reporter.metrics(dict.fromkeys(names, float(step)), step)
        took.append(time.perf_counter() - begin_s)
    return took


def _p99(seconds: list[float]) -> float:
    return float(np.quantile(seconds, 0.99))


class _Server:
    """The tracking server in a process of its own, as one on another machine would be."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self._process = process
        self.url = process.stdout.readline().strip()

    def arrived_after(self, reporter: ReporterApart) -> Counter[tuple[str, int]]:
        """Have the server be well, close the reporter, and count what arrived."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("well\n")
        self._process.stdin.flush()
        self._process.stdout.readline()
        reporter.close(_CLOSE_S)
        self._process.stdin.write("points\n")
        self._process.stdin.flush()
        found: Counter[tuple[str, int]] = Counter()
        for line in iter(self._process.stdout.readline, "\n"):
            name, step = line.split()
            found[name, int(step)] += 1
        return found


@contextmanager
def _server(mood: Mood) -> Iterator[_Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "pollux_agent.bench.tracking", mood],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield _Server(process)
    finally:
        process.kill()
        process.wait()
