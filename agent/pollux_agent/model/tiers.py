"""The fit of a tiered throughput model: T_sync has a pair (alpha, beta) for each tier of the network.

A model with T tiers has the parameters theta = (alpha_grad, beta_grad, alpha_1, beta_1, ..., alpha_T, beta_T,
gamma), all seconds but gamma, in the notation of Pollux section 3.2:

    T_grad = alpha_grad + beta_grad m
    T_sync = 0 on one replica, alpha_t + beta_t max(K - 2, 0) on a placement of tier t
    T_optim = (T_grad^gamma + T_sync^gamma)^(1 / gamma)

The paper has two tiers, one node and several; :mod:`pollux_agent.model.racks` has a third.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import isfinite

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from threadpoolctl import ThreadpoolController

from pollux_agent.model.throughput import MAX_GAMMA, MAX_SANE_S, MIN_GAMMA, FloatArray

TierOf = Callable[[FloatArray, FloatArray], NDArray[np.int64]]
"""Tier of each placement from its nodes and replicas (equal shapes): 0 for one replica, then 1, 2, ..."""

FAR_OVER_NEAR = 1.1
"""Until a tier was tried, a sync across it is taken to cost at least this times one across the tier below."""

_GAMMA_WEIGHT = 1e-3
_SLOPE_WEIGHT = 1e-2
_LOWEST_S = 1e-8
_NOTHING = 1e-300
_START_GAMMAS = (1.5, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Mean step times of one configuration (N nodes, K replicas, m samples per GPU) over ``count`` steps.

    ``accum_step_time_s`` is a pass without synchronisation, None while none was seen;
    ``optim_step_time_s`` is a pass with synchronisation, without the accumulation passes before it.
    """

    num_nodes: int
    num_replicas: int
    local_batch_size: int
    optim_step_time_s: float
    accum_step_time_s: float | None = None
    count: int = 1


Profile = Iterable[Observation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Usable observations, one a configuration, as arrays of one length n.

    ``accum`` is NaN where no such pass was seen. ``sync`` has shape (2 T, n): T_sync = (alpha_1, beta_1, ...,
    alpha_T, beta_T) @ sync.
    """

    local: FloatArray
    beyond_two: FloatArray
    tier: NDArray[np.int64]
    accum: FloatArray
    optim: FloatArray
    sync: FloatArray

    @property
    def num_tiers(self) -> int:
        return len(self.sync) // 2


def usable(profile: Profile, tier_of: TierOf, num_tiers: int) -> Points | None:
    """The observations that can be, those of one configuration merged into their mean; None if there is none.

    Left out: times that are not finite, not positive or absurd, and placements that cannot be.
    """
    sums: dict[tuple[int, int, int], list[float]] = {}
    for seen in profile:
        key = (seen.num_nodes, seen.num_replicas, seen.local_batch_size)
        optim, accum, count = seen.optim_step_time_s, seen.accum_step_time_s, float(seen.count)
        if count < 1 or not 1 <= key[0] <= key[1] or key[2] < 1 or not _is_time(optim):
            continue
        row = sums.setdefault(key, [0.0, 0.0, 0.0, 0.0])
        row[0] += count
        row[1] += count * optim
        if accum is not None and _is_time(accum):
            row[2] += count
            row[3] += count * accum
    if not sums:
        return None
    nodes, replicas, local = np.array(list(sums), dtype=np.float64).T
    optim_count, optim_sum, accum_count, accum_sum = np.array(list(sums.values())).T
    beyond_two, tier = np.maximum(replicas - 2.0, 0.0), tier_of(nodes, replicas)
    sync = np.zeros((2 * num_tiers, len(local)))
    for index in range(num_tiers):
        here = tier == index + 1
        sync[2 * index], sync[2 * index + 1] = here, here * beyond_two
    return Points(
        local=local,
        beyond_two=beyond_two,
        tier=tier,
        accum=np.divide(accum_sum, accum_count, out=np.full(len(local), np.nan), where=accum_count > 0),
        optim=optim_sum / optim_count,
        sync=sync,
    )


def _is_time(seconds: float) -> bool:
    return isfinite(seconds) and _LOWEST_S <= seconds <= MAX_SANE_S


class Objective:
    """What the fit minimises over the points; Pollux section 4.1, with the artifact's weights.

    RMSLE of T_grad against accumulation passes, plus RMSLE of T_optim against optimizer passes, plus
    1e-3 (gamma - 1)^2, plus 1e-2 (beta_t / alpha_t)^2 for each tier t on which more than two replicas were
    seen.
    """

    def __init__(self, points: Points) -> None:
        self._points = points
        self._log_optim = np.log(points.optim)
        self._seen = np.flatnonzero(~np.isnan(points.accum))
        self._log_accum = np.log(points.accum[self._seen])
        many = points.beyond_two > 0
        self._sloped = [t for t in range(1, points.num_tiers + 1) if np.any(many & (points.tier == t))]

    def __call__(self, theta: FloatArray) -> tuple[float, FloatArray]:
        """The objective at ``theta`` (shape 2 T + 3) and its exact gradient."""
        points, gamma = self._points, theta[-1]
        grad = theta[0] + theta[1] * points.local
        sync = theta[2:-1] @ points.sync + _NOTHING
        log_grad, log_sync = np.log(grad), np.log(sync)
        powers = gamma * log_sync
        log_joined = np.logaddexp(gamma * log_grad, powers)
        log_optim = log_joined / gamma
        share = np.exp(powers - log_joined)  # of T_sync in T_optim^gamma
        loss, weight = _rmsle(log_optim - self._log_optim)
        slope = np.empty_like(theta)
        slope[2:-1] = points.sync @ (weight * share / sync)
        slope[-1] = weight @ (log_grad + share * (log_sync - log_grad) - log_optim) / gamma
        by_log_grad = weight * (1.0 - share)
        if len(self._seen):
            more, weight = _rmsle(log_grad[self._seen] - self._log_accum)
            loss += more
            by_log_grad[self._seen] += weight
        by_grad = by_log_grad / grad
        slope[0], slope[1] = by_grad.sum(), by_grad @ points.local
        loss += _GAMMA_WEIGHT * (gamma - 1.0) ** 2
        slope[-1] += 2.0 * _GAMMA_WEIGHT * (gamma - 1.0)
        for tier in self._sloped:
            alpha, beta = theta[2 * tier], theta[2 * tier + 1]
            loss += _SLOPE_WEIGHT * (beta / alpha) ** 2
            slope[2 * tier] -= 2.0 * _SLOPE_WEIGHT * beta**2 / alpha**3
            slope[2 * tier + 1] += 2.0 * _SLOPE_WEIGHT * beta / alpha**2
        return float(loss), slope


def _rmsle(error: FloatArray) -> tuple[float, FloatArray]:
    """Root of the mean square of ``error`` (shape n), and its derivative by each error."""
    root = float(np.sqrt(error @ error / len(error) + 1e-16))
    return root, error / (len(error) * root)


def fit_tiers(points: Points, prior: FloatArray | None = None) -> FloatArray | None:
    """The theta of least :class:`Objective` by L-BFGS-B, None if the search finds no finite one.

    What was never tried keeps its optimistic prior (Pollux section 4.1): no cost of synchronisation, or what
    ``prior`` (another theta) says; only a tier above one that was tried costs at least 1.1 times that one.
    """
    pinned = _pinned(points, prior)
    unit = _unit(points)
    lower = np.full(len(unit), _LOWEST_S)
    upper = MAX_SANE_S / unit
    lower[-1], upper[-1] = MIN_GAMMA, MAX_GAMMA
    for index, value in pinned.items():
        lower[index] = upper[index] = value / unit[index]
    objective = Objective(points)

    def scaled(x: FloatArray) -> tuple[float, FloatArray]:
        loss, slope = objective(x * unit)
        return loss, slope * unit

    best, lowest = None, np.inf
    bounds = np.column_stack([lower, upper])
    with _blas().limit(limits=1, user_api="blas"):  # waking threads costs more than the work itself
        for start in _starts(points, prior):
            begin = np.clip(start / unit, lower, upper)
            found = minimize(scaled, begin, jac=True, method="L-BFGS-B", bounds=bounds)
            if np.all(np.isfinite(found.x)) and found.fun < lowest:
                best, lowest = found.x, float(found.fun)
    if best is None:
        return None
    theta = np.clip(best, lower, upper) * unit
    for tier in range(2, points.num_tiers + 1):
        if not np.any(points.tier == tier):
            here = slice(2 * tier, 2 * tier + 2)
            theta[here] = np.maximum(theta[here], FAR_OVER_NEAR * theta[2 * tier - 2 : 2 * tier])
    return np.asarray(theta, dtype=np.float64)


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries of this process; finding them takes a millisecond, so once."""
    return ThreadpoolController()


def _unit(points: Points) -> FloatArray:
    """A typical size of each parameter, so that the search sees numbers near 1."""
    seconds = float(np.mean(points.optim))
    unit = np.full(2 * points.num_tiers + 3, seconds)
    unit[1] = seconds / float(np.mean(points.local))
    unit[-1] = 1.0
    return unit


def _pinned(points: Points, prior: FloatArray | None) -> dict[int, float]:
    """Parameters that the points say nothing about, and the values they keep: index -> seconds (or gamma)."""
    last = 2 * points.num_tiers + 2
    pinned: dict[int, float] = {}
    if np.all(points.local == points.local[0]):
        share = 0.5
        if prior is not None:
            share = float(prior[0] / (prior[0] + prior[1] * points.local[0]))
        pinned[0] = share * float(np.mean(_compute_s(points)))
    for tier in range(1, points.num_tiers + 1):
        here = points.tier == tier
        if not np.any(here):
            pinned[2 * tier] = 0.0 if prior is None else float(prior[2 * tier])
        if not np.any(here & (points.beyond_two > 0)):
            pinned[2 * tier + 1] = 0.0 if prior is None else float(prior[2 * tier + 1])
    if not np.any(points.tier > 0):
        pinned[last] = MIN_GAMMA if prior is None else float(prior[last])
    return pinned


def _compute_s(points: Points) -> FloatArray:
    """Seconds of pure computation: accumulation passes, else one GPU's steps, else the shortest step."""
    seen, alone = ~np.isnan(points.accum), points.tier == 0
    if np.any(seen):
        return np.asarray(points.accum[seen])
    if np.any(alone):
        return np.asarray(points.optim[alone])
    return np.asarray([np.min(points.optim)])


def _starts(points: Points, prior: FloatArray | None) -> list[FloatArray]:
    """Where the search begins: lines through the points for some guesses of gamma, and the prior."""
    starts = [_start(points, gamma) for gamma in _START_GAMMAS]
    return starts if prior is None else [*starts, prior]


def _start(points: Points, gamma: float) -> FloatArray:
    """T_grad as a line through the accumulation passes, and for each tier T_sync as one through the rest."""
    seen = ~np.isnan(points.accum)
    compute = np.where(seen, points.accum, 0.7 * points.optim)
    alpha, beta = _line(points.local, compute)
    theta = [alpha, beta]
    grad = alpha + beta * points.local
    rest = (np.maximum(points.optim**gamma - grad**gamma, (0.1 * points.optim) ** gamma)) ** (1.0 / gamma)
    for tier in range(1, points.num_tiers + 1):
        here = points.tier == tier
        theta += _line(points.beyond_two[here], rest[here]) if np.any(here) else (0.0, 0.0)
    return np.array([*theta, gamma])


def _line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """(alpha, beta) of y = alpha + beta x, both above 0, by least squares of the relative error."""
    weight = 1.0 / y**2
    total, mean_x, mean_y = weight.sum(), weight @ x, weight @ y
    spread = weight @ x**2 * total - mean_x**2
    middle = float(mean_y / total)
    slope = (weight @ (x * y) * total - mean_x * mean_y) / spread if spread > 1e-12 * mean_x**2 else 0.0
    slope = min(max(float(slope), 0.0), 0.9 * middle * float(total) / max(float(mean_x), _NOTHING))
    return max(middle - slope * float(mean_x / total), 0.1 * middle), max(slope, 1e-3 * middle)
