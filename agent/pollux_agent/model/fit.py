"""The fit of the throughput model to measured step times; Pollux section 4.1."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from math import isfinite

import numpy as np
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from pollux_agent.model.throughput import (
    MAX_GAMMA,
    MAX_SANE_S,
    MIN_GAMMA,
    FloatArray,
    ThroughputParams,
    is_sane,
)

NODE_OVER_LOCAL = 1.1
"""Until several nodes were tried, a sync across them is taken to cost at least this times one on a node."""

_GAMMA_WEIGHT = 1e-3
_SLOPE_WEIGHT = 1e-2
_LOWEST = 1e-8


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


@dataclass(frozen=True, slots=True)
class _Data:
    """Usable observations as arrays of one length; ``accum`` is NaN where no such pass was seen."""

    nodes: FloatArray
    replicas: FloatArray
    local: FloatArray
    accum: FloatArray
    optim: FloatArray


def fit_throughput(profile: Profile, *, prior: ThroughputParams | None = None) -> ThroughputParams | None:
    """The parameters that best explain the observations, None if not one of them is usable.

    Minimises RMSLE of the accumulation step (T_grad) plus RMSLE of the optimizer step, plus
    1e-3 (gamma - 1)^2 + 1e-2 ((beta_node / alpha_node)^2 + (beta_local / alpha_local)^2), by L-BFGS-B.
    What was never tried keeps its optimistic prior (section 4.1): no cost of synchronisation. ``prior``
    is the fit of an earlier run of the same model; it stands in for what this run has not tried.
    Never raises: observations that cannot be (not finite, not positive, absurd) are left out.
    """
    prior = prior if prior is not None and is_sane(prior) else None
    data = _usable(profile)
    if data is None:
        return prior
    unit = np.array([*_units(data), 1.0])
    pinned = _pinned(data, prior)
    lower = np.array([_LOWEST] * 6 + [MIN_GAMMA])
    upper = np.array([MAX_SANE_S] * 6 + [MAX_GAMMA]) / unit
    for index, value in pinned.items():
        lower[index] = upper[index] = value / unit[index]
    best, lowest = None, np.inf
    for start in _starts(unit, prior):
        with threadpool_limits(limits=1, user_api="blas"):  # waking threads costs more than the work itself
            found = minimize(
                _loss,
                np.clip(start, lower, upper),
                args=(data, unit, pinned),
                jac=True,
                method="L-BFGS-B",
                bounds=np.column_stack([lower, upper]),
            )
        if np.all(np.isfinite(found.x)) and found.fun < lowest:
            best, lowest = found.x, float(found.fun)
    if best is None:
        return prior
    params = _params(_with_node_floor(np.clip(best, lower, upper) * unit, data))
    return params if is_sane(params) else prior


def _usable(profile: Profile) -> _Data | None:
    """The observations that can be, those of one configuration merged into their mean."""
    sums: dict[tuple[int, int, int], FloatArray] = {}
    for seen in profile:
        key = (seen.num_nodes, seen.num_replicas, seen.local_batch_size)
        if seen.count < 1 or not 1 <= key[0] <= key[1] or key[2] < 1 or not _is_time(seen.optim_step_time_s):
            continue
        count, accum = float(seen.count), seen.accum_step_time_s
        has_accum = accum is not None and _is_time(accum)
        row = [count, count * seen.optim_step_time_s]
        row += [count, count * accum] if accum is not None and has_accum else [0.0, 0.0]
        sums[key] = sums.get(key, np.zeros(4)) + np.array(row)
    if not sums:
        return None
    nodes, replicas, local = np.array(list(sums), dtype=np.float64).T
    optim_count, optim, accum_count, accum_sum = np.array(list(sums.values())).T
    mean_accum = np.divide(accum_sum, accum_count, out=np.full(len(sums), np.nan), where=accum_count > 0)
    return _Data(nodes, replicas, local, mean_accum, optim / optim_count)


def _is_time(seconds: float) -> bool:
    return isfinite(seconds) and _LOWEST <= seconds <= MAX_SANE_S


def _compute_s(data: _Data) -> FloatArray:
    """Seconds of pure computation: accumulation passes, else one GPU's steps, else the shortest step."""
    if np.any(~np.isnan(data.accum)):
        return np.asarray(data.accum[~np.isnan(data.accum)])
    if np.any(data.replicas == 1):
        return np.asarray(data.optim[data.replicas == 1])
    return np.asarray(data.optim[[np.argmin(data.optim)]])


def _units(data: _Data) -> list[float]:
    """A typical size of each of the six times, so that the optimiser sees numbers near 1."""
    seconds = float(np.mean(data.optim))
    return [seconds, seconds / float(np.mean(data.local)), seconds, seconds, seconds, seconds]


def _pinned(data: _Data, prior: ThroughputParams | None) -> dict[int, float]:
    """Parameters that the data says nothing about, and the values they keep: index -> seconds (or gamma)."""
    known = None if prior is None else _vector(prior)
    pinned: dict[int, float] = {}
    if len(np.unique(data.local)) == 1:
        share = 0.5
        if prior is not None:
            slope = prior.beta_grad * float(data.local[0])
            share = prior.alpha_grad / (prior.alpha_grad + slope)
        pinned[0] = share * float(np.mean(_compute_s(data)))
    for first, here in ((2, data.nodes == 1), (4, data.nodes > 1)):
        if not np.any(here & (data.replicas > 1)):
            pinned[first] = 0.0 if known is None else float(known[first])
        if not np.any(here & (data.replicas > 2)):
            pinned[first + 1] = 0.0 if known is None else float(known[first + 1])
    if not np.any(data.replicas > 1):
        pinned[6] = MIN_GAMMA if known is None else float(known[6])
    return pinned


def _starts(unit: FloatArray, prior: ThroughputParams | None) -> list[FloatArray]:
    """Where the search begins, in multiples of ``unit``: mostly computing, mostly waiting, and the prior."""
    starts = [
        np.array([0.3, 0.5, 0.1, 0.01, 0.3, 0.01, 1.5]),
        np.array([0.05, 0.2, 0.5, 0.05, 0.8, 0.05, 3.0]),
    ]
    if prior is not None:
        starts.append(_vector(prior) / unit)
    return starts


def _loss(
    scaled: FloatArray, data: _Data, unit: FloatArray, pinned: dict[int, float]
) -> tuple[float, FloatArray]:
    """The published objective and its gradient in the scaled parameters (shape 7)."""
    theta = scaled * unit
    gamma = theta[6]
    several, across = data.replicas > 1, data.nodes > 1
    beyond_two = np.maximum(data.replicas - 2.0, 0.0)
    zero, one = np.zeros_like(data.local), np.ones_like(data.local)
    local, node = several & ~across, several & across
    d_grad = np.stack([one, data.local, zero, zero, zero, zero])
    d_sync = np.stack([zero, zero, local, local * beyond_two, node, node * beyond_two])
    grad, sync = np.einsum("i,ij", theta[:6], d_grad), np.einsum("i,ij", theta[:6], d_sync)

    log_grad, log_sync = np.log(grad), np.log(np.maximum(sync, 1e-300))
    powers = np.stack([gamma * log_grad, np.where(several, gamma * log_sync, -np.inf)])
    log_optim = np.logaddexp(powers[0], powers[1]) / gamma
    weight = np.exp(powers - gamma * log_optim)
    d_log_optim = weight[0] * d_grad / grad + weight[1] * d_sync / np.maximum(sync, 1e-300)
    spread = weight[0] * (log_grad - log_optim) + weight[1] * np.where(several, log_sync - log_optim, 0.0)
    d_log_optim = np.vstack([d_log_optim, spread / gamma])

    seen = ~np.isnan(data.accum)
    loss, slope = _rmsle(log_optim - np.log(data.optim), d_log_optim)
    if np.any(seen):
        d_log_grad = np.vstack([d_grad / grad, zero])
        accum_loss, accum_slope = _rmsle((log_grad - np.log(data.accum))[seen], d_log_grad[:, seen])
        loss, slope = loss + accum_loss, slope + accum_slope
    loss += _GAMMA_WEIGHT * (gamma - 1.0) ** 2
    slope[6] += 2.0 * _GAMMA_WEIGHT * (gamma - 1.0)
    for alpha in (2, 4):
        if alpha in pinned or alpha + 1 in pinned:
            continue
        ratio = theta[alpha + 1] / theta[alpha]
        loss += _SLOPE_WEIGHT * ratio**2
        slope[alpha + 1] += 2.0 * _SLOPE_WEIGHT * ratio / theta[alpha]
        slope[alpha] -= 2.0 * _SLOPE_WEIGHT * ratio**2 / theta[alpha]
    return float(loss), slope * unit


def _rmsle(error: FloatArray, d_error: FloatArray) -> tuple[float, FloatArray]:
    """Root of the mean square of ``error`` (shape n) and its gradient; ``d_error`` has shape (7, n)."""
    root = float(np.sqrt(np.mean(error**2) + 1e-16))
    return root, np.einsum("ij,j", d_error, error) / (len(error) * root)


def _with_node_floor(theta: FloatArray, data: _Data) -> FloatArray:
    """Several nodes cost at least 1.1 times one, as long as nothing but one node was measured."""
    if not np.any((data.nodes > 1) & (data.replicas > 1)):
        theta[4:6] = np.maximum(theta[4:6], NODE_OVER_LOCAL * theta[2:4])
    return theta


def _vector(params: ThroughputParams) -> FloatArray:
    return np.array(astuple(params))


def _params(theta: FloatArray) -> ThroughputParams:
    names = (field.name for field in fields(ThroughputParams))
    return ThroughputParams(**dict(zip(names, theta.tolist(), strict=True)))
