"""How many epochs make a training last the wanted time on this machine: some seconds of timing, a formula.

A job that has the cluster to itself starts on one slot; each decision may double that, up to the limit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pollux_agent.protocol import Event

GAIN_PER_DOUBLING = 1.5
"""Speed on 2n slots over that on n: the local cluster's bench demands 1.5 for 4 slots over 1, and small
models on slots that are shares of a few cores gain about this much from one doubling."""
_MOST = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What some seconds on one slot showed: progress in steps of size M0, as the workers' events count it.

    ``start_s`` is from the workers' start to their first step.
    """

    progress_per_s: float
    epoch_progress: float
    start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How a job alone on the cluster grows: at most doubled every ``interval_s``, up to ``max_slots``."""

    interval_s: float
    max_slots: int

    def speeds(self) -> tuple[float, ...]:
        """Speed over that on one slot, one value an interval; the last one stays."""
        return tuple(GAIN_PER_DOUBLING**n for n in range(int(math.log2(self.max_slots)) + 1))


def progress_alone(timing: Timing, growth: Growth, seconds: float) -> float:
    """Progress that a job alone makes in ``seconds`` from its start; every (re)start costs ``start_s``."""
    speeds = growth.speeds()
    total = 0.0
    for number, speed in enumerate(speeds):
        begin = number * growth.interval_s
        end = seconds if number == len(speeds) - 1 else min(seconds, begin + growth.interval_s)
        total += timing.progress_per_s * speed * max(0.0, end - begin - timing.start_s)
    return total


def seconds_alone(timing: Timing, growth: Growth, epochs: int) -> float:
    """Seconds that ``epochs`` statistical epochs take a job alone: the inverse of ``progress_alone``."""
    wanted = epochs * timing.epoch_progress
    low, high = 0.0, 1.0
    while progress_alone(timing, growth, high) < wanted:
        high *= 2.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if progress_alone(timing, growth, middle) < wanted else (low, middle)
    return high


def epochs_for(timing: Timing, growth: Growth, seconds: float) -> int:
    """The number of epochs, one at least, that lasts nearest to ``seconds`` for a job alone."""
    return max(1, round(progress_alone(timing, growth, seconds) / timing.epoch_progress))


def speed_seen(timing: Timing, growth: Growth, *, progress: float, seconds: float) -> float:
    """Speed of a training over what ``timing`` promised, from its ``progress`` in the ``seconds`` since its
    start, with the cluster to itself; 1 while there is none, and within a factor of 4.

    A machine may be much slower or faster minutes after its scripts were timed.
    """
    promised = progress_alone(timing, growth, seconds)
    if progress <= 0 or promised <= 0:
        return 1.0
    return min(max(progress / promised, 1 / _MOST), _MOST)


def timing_from(events: Sequence[Event], *, epochs: int) -> Timing:
    """The timing that rank 0's events of a complete training of ``epochs`` epochs show.

    The first third of its steps is left out of the speed: the machine warms up and the batch size is still
    being tuned. Raises ValueError when the training is not complete or took too few steps to tell.
    """
    steps = [event for event in events if event.event == "step"]
    done = next((event for event in events if event.event == "done"), None)
    if done is None or not steps:
        raise ValueError("the training is not complete, so nothing can be told from it")
    warm_s = steps[0].t_unix_s + (done.t_unix_s - steps[0].t_unix_s) / 3
    base = next((event for event in steps if event.t_unix_s >= warm_s), steps[0])
    seconds, progress = done.t_unix_s - base.t_unix_s, done.progress - base.progress
    if seconds <= 0 or progress <= 0:
        raise ValueError(f"{len(steps)} step events are too few to tell a speed from")
    return Timing(
        progress_per_s=progress / seconds,
        epoch_progress=done.progress / epochs,
        start_s=max(0.0, steps[0].t_unix_s - events[0].t_unix_s),
    )


def stepping_seconds(events: Sequence[Event]) -> float:
    """Seconds from the first step to the last event; 0 before the first step."""
    first = next((event.t_unix_s for event in events if event.event == "step"), None)
    return 0.0 if first is None else events[-1].t_unix_s - first
