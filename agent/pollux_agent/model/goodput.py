"""GOODPUT of Pollux section 3: useful samples per second, and the batch split (m, s) that gives most."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pollux_agent.model.bisection import BatchLimits, bisect_splits, ceil_div
from pollux_agent.model.efficiency import efficiency
from pollux_agent.model.search import Problem, joined, search_all, search_one
from pollux_agent.model.throughput import FloatArray, IntArray, StepTimes, ThroughputParams

_SEARCHED_AT_ONCE = 2048
"""Placements in one search: more do not fit the processor's cache."""

__all__ = ["BatchLimits", "BestConfig", "GoodputModel", "best_of_jobs"]


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
    stays at M0 and counts as scaling perfectly, so its goodput is the number of GPUs, in no unit. Numbers
    that cannot be count as None. A job that is not ``adaptive`` trains at M0 whatever its GPUs, with
    EFFICIENCY = 1.
    """

    params: StepTimes | None
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
        if isinstance(self.params, ThroughputParams) and not self.params.is_sane():
            return False
        known = self.noise_scale is not None and self.noise_scale >= 0
        return self.params is not None and (known or not self.adaptive)

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
        if self.params is None or not self.is_fitted:
            return np.array(np.broadcast_to(replicas, batch.shape))
        initial = self.limits.initial_batch_size
        if self.adaptive and self.noise_scale is not None:
            useful = batch * np.minimum(efficiency(self.noise_scale, initial, batch), 1.0)
        else:
            useful = np.minimum(batch, initial)
        seconds = self.params.step_time(num_nodes, num_replicas, local_batch_size, accumulation_steps)
        return np.divide(useful, seconds, out=np.zeros(np.shape(seconds)), where=seconds > 0)

    def best(self, num_nodes: ArrayLike, num_replicas: ArrayLike) -> BestConfig:
        """The split (m, s) of highest goodput on K GPUs of N nodes, over broadcast arrays of any shape.

        M = K m (s + 1) lies between M0 and the limit, or one whole split below M0 where M0 does not come
        out even and rounding up would pass the limit. One GPU takes M > M0 only with s >= 1, so that
        gradients can be compared within a step (unless the least m alone is above M0).
        """
        quick = self._is_quick and not self._is_tight
        if quick and isinstance(num_nodes, int) and isinstance(num_replicas, int):
            local, steps, value = search_one(self._problem(num_nodes, max(num_replicas, 1)))
            if value > 0 and num_replicas > 0:
                return BestConfig(
                    goodput=np.array(value),
                    local_batch_size=np.array(local),
                    accumulation_steps=np.array(steps),
                )
        found = best_of_jobs([self], num_nodes, num_replicas)
        return BestConfig(
            goodput=found.goodput[0],
            local_batch_size=found.local_batch_size[0],
            accumulation_steps=found.accumulation_steps[0],
        )

    def _fixed_split(self, replicas: IntArray) -> tuple[IntArray, IntArray]:
        """(m, s) of the batch M0, rounded up, or down where up passes the limit; m = 0 if neither fits."""
        limits = self.limits
        safe = np.maximum(replicas, 1)
        share = ceil_div(limits.initial_batch_size, safe)
        steps = ceil_div(share, limits.max_local_batch_size) - 1
        local = np.maximum(ceil_div(share, steps + 1), limits.min_local_batch_size)
        local = np.minimum(local, limits.max_batch_size // (safe * (steps + 1)))
        fits = (replicas >= 1) & (local >= limits.min_local_batch_size)
        return np.where(fits, local, 0), steps

    @property
    def _is_quick(self) -> bool:
        """Whether the batch is tuned and the paper's equations hold, so that the search can use them."""
        return self.adaptive and isinstance(self.params, ThroughputParams) and self.is_fitted

    @property
    def _is_tight(self) -> bool:
        """Whether M0 rounded up to whole splits can pass the limit, so that rounding down may be better."""
        return self.limits.max_batch_size < 2 * self.limits.initial_batch_size

    def _problem(self, nodes: ArrayLike, replicas: ArrayLike) -> Problem:
        """What :mod:`pollux_agent.model.search` asks: columns for arrays of placements, numbers for one."""
        params, limits = self.params, self.limits
        assert isinstance(params, ThroughputParams) and self.noise_scale is not None
        sync = params.sync_time(nodes, replicas)
        one = sync.ndim == 0
        return Problem(
            alpha=params.alpha_grad,
            beta=params.beta_grad,
            gamma=params.gamma,
            sync=float(sync) if one else sync[:, None],
            replicas=float(np.asarray(replicas)) if one else np.asarray(replicas, dtype=np.float64)[:, None],
            noise=float(self.noise_scale),
            initial=float(limits.initial_batch_size),
            max_batch=float(limits.max_batch_size),
            min_local=float(limits.min_local_batch_size),
            max_local=float(limits.max_local_batch_size),
        )


def best_of_jobs(models: Sequence[GoodputModel], num_nodes: ArrayLike, num_replicas: ArrayLike) -> BestConfig:
    """:meth:`GoodputModel.best` of every model on the same placements, in one search for all of them.

    The answer's arrays have the jobs as their first axis, then the shape of the placements.
    """
    nodes, replicas = np.broadcast_arrays(num_nodes, num_replicas)
    spans, counts, inverse = _distinct(models, nodes.ravel(), replicas.ravel())
    local, steps, value = _tuned_splits(models, spans, counts)
    for row, model in enumerate(models):
        if np.all(value[row] > 0) and not model._is_tight:
            continue
        fixed_local, fixed_steps = model._fixed_split(counts)
        left = np.flatnonzero(((value[row] == 0) | model._is_tight) & (fixed_local > 0))
        fixed = model.goodput(spans[left], counts[left], fixed_local[left], fixed_steps[left])
        better = fixed > value[row, left]
        left = left[better]
        local[row, left], steps[row, left] = fixed_local[left], fixed_steps[left]
        value[row, left] = fixed[better]
    shape = (len(models), *nodes.shape)
    return BestConfig(
        goodput=value[:, inverse].reshape(shape),
        local_batch_size=local[:, inverse].reshape(shape),
        accumulation_steps=steps[:, inverse].reshape(shape),
    )


def _tuned_splits(
    models: Sequence[GoodputModel], nodes: IntArray, replicas: IntArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """(m, s, goodput), each (jobs, placements), with M0 <= M <= limit; goodput 0 where there is none."""
    shape = (len(models), len(nodes))
    local, steps, value = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape)
    if not nodes.size:
        return local, steps, value
    safe = np.maximum(replicas, 1)
    quick = [row for row, model in enumerate(models) if model._is_quick]
    rows_at_once = max(1, _SEARCHED_AT_ONCE // len(nodes))
    for begin in range(0, len(quick), rows_at_once):
        rows = quick[begin : begin + rows_at_once]
        found = search_all(joined([models[row]._problem(nodes, safe) for row in rows]))
        for target, flat in zip((local, steps, value), found, strict=True):
            target[rows] = flat.reshape(len(rows), -1)
    for row, model in enumerate(models):
        if model.adaptive and model.is_fitted and not model._is_quick:
            local[row], steps[row], value[row] = bisect_splits(model.goodput, model.limits, nodes, safe)
    value[:, replicas < 1] = 0.0
    local[value == 0], steps[value == 0] = 0, 0
    return local, steps, value


def _distinct(
    models: Sequence[GoodputModel], nodes: IntArray, replicas: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Placements that differ to any of the models, as (nodes, replicas), and which each given one is."""
    kinds = {type(model.params): model.params for model in models if model.params is not None}
    if not kinds:
        classes = np.ones_like(nodes)
    elif set(kinds) == {ThroughputParams}:
        classes = kinds[ThroughputParams].node_class(nodes)
    else:
        per_model = [model.params.node_class(nodes) for model in models if model.params is not None]
        same = all(np.array_equal(per_model[0], other) for other in per_model[1:])
        classes = per_model[0] if same else nodes
    if nodes.size < 2:
        return classes, replicas, np.zeros(nodes.size, dtype=np.int64)
    width = int(np.max(replicas, initial=0)) + 1
    keys, inverse = np.unique(classes * width + np.maximum(replicas, 0), return_inverse=True)
    return keys // width, keys % width, inverse
