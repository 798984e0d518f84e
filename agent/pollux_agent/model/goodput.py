"""GOODPUT of Pollux section 3: useful samples per second, and the batch split (m, s) that gives most."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pollux_agent.model.efficiency import efficiency
from pollux_agent.model.throughput import FloatArray, ThroughputParams, step_time

IntArray = NDArray[np.int64]

_DENSE_STEPS = 32
_STEP_RATIO = 1.1
_SPARE_STEPS = 4
_MAX_NEAR = 128
"""Neighbours looked at on each side, so that no limits, however odd, need much time or memory."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BestConfig:
    """The best split for each placement asked about; equal shapes, all 0 where no split is allowed."""

    goodput: FloatArray
    local_batch_size: IntArray
    accumulation_steps: IntArray


@dataclass(frozen=True, slots=True)
class GoodputModel:
    """GOODPUT(N, K, m, s) = THROUGHPUT x EFFICIENCY of one job; Pollux Eq. 1.

    ``params`` or (for an adaptive job) ``noise_scale`` is None before the first measurement: the job then
    stays at M0 and counts as scaling perfectly, so its goodput is the number of GPUs, in no unit. A job
    that is not ``adaptive`` trains at M0 whatever its GPUs, with EFFICIENCY = 1.
    """

    params: ThroughputParams | None
    noise_scale: float | None
    limits: BatchLimits
    adaptive: bool = True

    @classmethod
    def unfitted(cls, limits: BatchLimits, *, adaptive: bool = True) -> "GoodputModel":
        """The model of a job of which nothing was measured yet."""
        return cls(None, None, limits, adaptive)

    @property
    def is_fitted(self) -> bool:
        """Whether goodput is in samples per second."""
        return self.params is not None and (self.noise_scale is not None or not self.adaptive)

    def goodput(
        self,
        num_nodes: ArrayLike,
        num_replicas: ArrayLike,
        local_batch_size: ArrayLike,
        accumulation_steps: ArrayLike,
    ) -> FloatArray:
        """Useful samples per second for given splits, over broadcast arrays; the limits are not checked.

        Samples beyond M0 of a fixed batch (a split that does not come out even) count for nothing.
        """
        replicas = np.asarray(num_replicas, dtype=np.float64)
        local = np.asarray(local_batch_size, dtype=np.float64)
        batch = replicas * local * (np.asarray(accumulation_steps, dtype=np.float64) + 1.0)
        if self.params is None or (self.adaptive and self.noise_scale is None):
            return np.array(np.broadcast_to(replicas, batch.shape))
        initial = self.limits.initial_batch_size
        if self.adaptive and self.noise_scale is not None:
            useful = batch * np.minimum(efficiency(self.noise_scale, initial, batch), 1.0)
        else:
            useful = np.minimum(batch, initial)
        seconds = step_time(self.params, num_nodes, num_replicas, local_batch_size, accumulation_steps)
        return np.divide(useful, seconds, out=np.zeros(np.shape(seconds)), where=seconds > 0)

    def best(self, num_nodes: ArrayLike, num_replicas: ArrayLike) -> BestConfig:
        """The split (m, s) of highest goodput on K GPUs of N nodes, over broadcast arrays of any shape.

        M = K m (s + 1) lies between M0 and the limit, or one whole split below M0 where M0 does not come
        out even and rounding up would pass the limit. One GPU takes M > M0 only with s >= 1, so that
        gradients can be compared within a step (unless the least m alone is above M0).
        """
        nodes, replicas = np.broadcast_arrays(num_nodes, num_replicas)
        placements, inverse = np.unique(
            np.stack([np.minimum(nodes, 2).ravel(), replicas.ravel()]), axis=1, return_inverse=True
        )  # T_sync only asks whether there is more than one node
        spans, counts = placements.astype(np.int64)
        local, steps = self._fixed_split(counts)
        value = np.where(local > 0, self.goodput(spans, counts, local, steps), 0.0)
        if self.adaptive and self.is_fitted and counts.size:
            tuned_local, tuned_steps, tuned = self._tuned_split(spans, counts)
            better = tuned > value
            local, steps = np.where(better, tuned_local, local), np.where(better, tuned_steps, steps)
            value = np.where(better, tuned, value)
        pick = inverse.reshape(nodes.shape)
        return BestConfig(
            goodput=value[pick],
            local_batch_size=local[pick],
            accumulation_steps=np.where(local > 0, steps, 0)[pick],
        )

    def _fixed_split(self, replicas: IntArray) -> tuple[IntArray, IntArray]:
        """(m, s) of the batch M0, rounded up, or down where up passes the limit; m = 0 if neither fits."""
        limits = self.limits
        safe = np.maximum(replicas, 1)
        share = _ceil_div(limits.initial_batch_size, safe)
        steps = _ceil_div(share, limits.max_local_batch_size) - 1
        local = np.maximum(_ceil_div(share, steps + 1), limits.min_local_batch_size)
        local = np.minimum(local, limits.max_batch_size // (safe * (steps + 1)))
        fits = (replicas >= 1) & (local >= limits.min_local_batch_size)
        return np.where(fits, local, 0), steps

    def _tuned_split(self, nodes: IntArray, replicas: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """(m, s, goodput) of the best split with M0 <= M <= limit for each placement; goodput 0 if none.

        For given s, 1 / GOODPUT is convex in 1 / m (T_iter is convex in m), so goodput has one peak in m
        and bisection finds it. A larger s than M needs only adds overhead, so s runs up to what the limit
        needs and a few more (for the rounding): every value, or a geometric row and then the best one's
        neighbours, of many an even selection first.
        """
        limits = self.limits
        safe = np.maximum(replicas, 1)
        first = _ceil_div(limits.initial_batch_size, safe * limits.max_local_batch_size) - 1
        last = _ceil_div(limits.max_batch_size, safe * limits.max_local_batch_size) - 1 + _SPARE_STEPS
        offsets = _offsets(int(np.max(last - first, initial=0)))
        steps = np.minimum(first[:, None] + offsets, last[:, None])
        local, steps, value = self._best_of(nodes, replicas, steps)
        gap = int(np.max(np.diff(offsets), initial=1)) - 1
        while gap > 0:
            count = min(gap, _MAX_NEAR)
            reach = np.linspace(-gap, gap, 2 * count + 1).round().astype(np.int64)
            near = np.clip(steps[:, None] + reach, first[:, None], last[:, None])
            local, steps, value = self._best_of(nodes, replicas, near)
            gap = int(np.max(np.diff(reach))) - 1
        return local, steps, value

    def _best_of(
        self, nodes: IntArray, replicas: IntArray, steps: IntArray
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """(m, s, goodput) of the best split with s among ``steps`` (shape placements x candidates)."""
        limits = self.limits
        where = (nodes[:, None], np.maximum(replicas, 1)[:, None])
        parts = where[1] * (steps + 1)
        low = np.maximum(_ceil_div(limits.initial_batch_size, parts), limits.min_local_batch_size)
        high = np.minimum(limits.max_batch_size // parts, limits.max_local_batch_size)
        high = np.where(parts == 1, np.minimum(high, limits.initial_batch_size), high)
        allowed = (low <= high) & (replicas[:, None] >= 1)
        low, high = np.where(allowed, low, 1), np.where(allowed, high, 1)
        while np.any(low < high):
            middle = (low + high) // 2
            rising = self.goodput(*where, middle + 1, steps) > self.goodput(*where, middle, steps)
            low, high = np.where(rising, np.minimum(middle + 1, high), low), np.where(rising, high, middle)
        value = np.where(allowed, self.goodput(*where, low, steps), 0.0)
        best = (np.arange(len(replicas)), np.argmax(value, axis=1))
        return low[best], steps[best], value[best]


def _ceil_div(numerator: ArrayLike, denominator: ArrayLike) -> IntArray:
    return np.asarray(-(-np.asarray(numerator) // np.asarray(denominator)), dtype=np.int64)


def _offsets(last: int) -> IntArray:
    """0, 1, 2, ... at first, then growing by a tenth each, up to ``last``."""
    if last < _DENSE_STEPS:
        return np.arange(last + 1)
    count = int(np.ceil(np.log(last / _DENSE_STEPS) / np.log(_STEP_RATIO))) + 1
    sparse = np.geomspace(_DENSE_STEPS, last, count + 1).round().astype(np.int64)
    return np.unique(np.concatenate([np.arange(_DENSE_STEPS), sparse]))
