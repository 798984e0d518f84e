"""Step times as they are measured, per configuration, and the pace that keeps to a share of a core."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pollux_agent.model.fit import Observation

KEPT_TIMES = 50
"""Measurements kept per configuration; their median is what is fitted."""
WARM_UP_STEPS = 2
"""Steps not measured after a start or a change: caches fill and workers start in them."""

Key = tuple[int, int, int]


@dataclass(slots=True)
class _Times:
    accum_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    optim_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    count: int = 0


class Profile:
    """Step times of every configuration this job has run: (nodes, replicas, local batch size) -> seconds."""

    def __init__(self) -> None:
        self._times: dict[Key, _Times] = {}

    def record(self, key: Key, *, accum_s: list[float], optim_s: float) -> None:
        """Add one step: its micro-batches without synchronisation, and the one with it."""
        times = self._times.get(key)
        if times is None:
            times = self._times[key] = _Times()
        times.accum_s.extend(accum_s)
        times.optim_s.append(optim_s)
        times.count += 1

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas that was measured, 0 before the first step."""
        return max((num_replicas for _, num_replicas, _ in self._times), default=0)

    def observations(self) -> list[Observation]:
        """One observation a configuration, for the fit."""
        return [
            Observation(
                num_nodes=key[0],
                num_replicas=key[1],
                local_batch_size=key[2],
                optim_step_time_s=statistics.median(times.optim_s),
                accum_step_time_s=statistics.median(times.accum_s) if times.accum_s else None,
                count=times.count,
            )
            for key, times in self._times.items()
        ]

    def state_dict(self) -> list[dict[str, Any]]:
        return [
            {
                "key": list(key),
                "accum_s": list(times.accum_s),
                "optim_s": list(times.optim_s),
                "count": times.count,
            }
            for key, times in self._times.items()
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        self._times = {
            (row["key"][0], row["key"][1], row["key"][2]): _Times(
                deque(row["accum_s"], maxlen=KEPT_TIMES),
                deque(row["optim_s"], maxlen=KEPT_TIMES),
                row["count"],
            )
            for row in state
        }


class StepTimer:
    """Seconds of each micro-batch of a step, from the end of one to the end of the next.

    What happens at a step boundary (checkpoint, report, a new batch size) lies between :meth:`end` of the
    last micro-batch and :meth:`start`, and is not counted.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark = clock()
        self._micro_s: list[float] = []
        self._skip = WARM_UP_STEPS

    def start(self) -> None:
        """A step begins now."""
        self._mark = self._clock()
        self._micro_s = []

    def end(self) -> None:
        """A micro-batch ended."""
        now = self._clock()
        self._micro_s.append(now - self._mark)
        self._mark = now

    def changed(self) -> None:
        """Another configuration begins."""
        self._skip = WARM_UP_STEPS

    def take(self) -> tuple[list[float], float, bool]:
        """(micro-batches before the last, the last one, whether the step was past the warm-up)."""
        measured = self._skip == 0
        self._skip = max(0, self._skip - 1)
        return self._micro_s[:-1], self._micro_s[-1], measured


class Pace:
    """Keeps this process to ``share`` of a core by pausing, where nothing else does.

    Pauses until CPU time over wall time is back at the share. Time spent idle earns at most ``credit_s``
    of CPU time above it, so that waiting for a slower replica is not followed by a burst.
    """

    def __init__(
        self,
        share: float,
        *,
        credit_s: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share, self._credit_s = share, credit_s
        self._clock, self._cpu_clock, self._sleep = clock, cpu_clock, sleep
        self._last, self._last_cpu = clock(), cpu_clock()
        self._balance_s = 0.0

    def pause(self) -> None:
        """Sleep off the CPU time used above the share since the last call."""
        now, cpu = self._clock(), self._cpu_clock()
        self._balance_s += self._share * (now - self._last) - (cpu - self._last_cpu)
        self._balance_s = min(self._balance_s, self._credit_s)
        self._last, self._last_cpu = now, cpu
        if self._balance_s < 0:
            self._sleep(-self._balance_s / self._share)
