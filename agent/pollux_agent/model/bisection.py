"""The best batch split of any throughput model, known only by the times that it predicts.

For given s, 1 / GOODPUT is convex in 1 / m (T_iter is convex in m), so goodput has one peak in m and
bisection finds it. A larger s than M needs only adds overhead, so s runs up to what the limit needs and a
few more (for the rounding): every value, or a geometric row and then the best one's neighbours.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pollux_agent.model.throughput import FloatArray, IntArray

_DENSE_STEPS = 32
_STEP_RATIO = 1.1
_SPARE_STEPS = 4

Goodput = Callable[[IntArray, IntArray, IntArray, IntArray], FloatArray]
"""Useful samples per second of (N, K, m, s), over broadcast arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds in samples: M0 <= M <= max_batch_size in total, and m per GPU.

    Raises ValueError naming the field that contradicts another.
    """

    initial_batch_size: int
    max_batch_size: int
    max_local_batch_size: int
    min_local_batch_size: int = 1

    def __post_init__(self) -> None:
        if self.min_local_batch_size < 1 or self.initial_batch_size < 1:
            raise ValueError(
                f"min_local_batch_size is {self.min_local_batch_size} and initial_batch_size "
                f"{self.initial_batch_size}; both must be at least 1"
            )
        if self.max_batch_size < self.initial_batch_size:
            raise ValueError(
                f"max_batch_size is {self.max_batch_size}, below initial_batch_size "
                f"{self.initial_batch_size}; raise it"
            )
        if self.max_local_batch_size < self.min_local_batch_size:
            raise ValueError(
                f"max_local_batch_size is {self.max_local_batch_size}, below min_local_batch_size "
                f"{self.min_local_batch_size}; raise it"
            )


def bisect_splits(
    goodput: Goodput, limits: BatchLimits, nodes: IntArray, replicas: IntArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """(m, s, goodput) of the best split with M0 <= M <= limit of each placement; goodput 0 if none."""
    full = np.maximum(replicas, 1) * limits.max_local_batch_size
    first = ceil_div(limits.initial_batch_size, full) - 1
    last = ceil_div(limits.max_batch_size, full) - 1 + _SPARE_STEPS
    offsets = _offsets(int(np.max(last - first, initial=0)))
    steps = np.minimum(first[:, None] + offsets, last[:, None])
    local, steps, value = _best_of(goodput, limits, nodes, replicas, steps)
    gap = int(np.max(np.diff(offsets), initial=1)) - 1
    if gap:
        near = np.clip(steps[:, None] + np.arange(-gap, gap + 1), first[:, None], last[:, None])
        local, steps, value = _best_of(goodput, limits, nodes, replicas, near)
    return local, steps, value


def _best_of(
    goodput: Goodput, limits: BatchLimits, nodes: IntArray, replicas: IntArray, steps: IntArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """(m, s, goodput) of the best split with s among ``steps`` (shape placements x candidates)."""
    where = (nodes[:, None], np.maximum(replicas, 1)[:, None])
    parts = where[1] * (steps + 1)
    low = np.maximum(ceil_div(limits.initial_batch_size, parts), limits.min_local_batch_size)
    high = np.minimum(limits.max_batch_size // parts, limits.max_local_batch_size)
    high = np.where(parts == 1, np.minimum(high, limits.initial_batch_size), high)
    allowed = (low <= high) & (replicas[:, None] >= 1)
    low, high = np.where(allowed, low, 1), np.where(allowed, high, 1)
    while np.any(low < high):
        middle = (low + high) // 2
        rising = goodput(*where, middle + 1, steps) > goodput(*where, middle, steps)
        low, high = np.where(rising, np.minimum(middle + 1, high), low), np.where(rising, high, middle)
    value = np.where(allowed, goodput(*where, low, steps), 0.0)
    best = (np.arange(len(replicas)), np.argmax(value, axis=1))
    return low[best], steps[best], value[best]


def ceil_div(numerator: ArrayLike, denominator: ArrayLike) -> IntArray:
    """Whole numbers above or equal to the quotient."""
    return np.asarray(-(-np.asarray(numerator) // np.asarray(denominator)), dtype=np.int64)


def _offsets(last: int) -> IntArray:
    """0, 1, 2, ... at first, then growing by a tenth each, up to ``last``."""
    if last < _DENSE_STEPS:
        return np.arange(last + 1)
    count = int(np.ceil(np.log(last / _DENSE_STEPS) / np.log(_STEP_RATIO))) + 1
    sparse = np.geomspace(_DENSE_STEPS, last, count + 1).round().astype(np.int64)
    return np.unique(np.concatenate([np.arange(_DENSE_STEPS), sparse]))
