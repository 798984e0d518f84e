"""Goodput of many jobs on many configurations at once: :meth:`GoodputModel.best`, over arrays of jobs.

The search for the best split runs on a grid of total batch sizes that is refined where it is best, so a
goodput may be a fraction of a per cent below the optimum; it always belongs to an allowed split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from pollux.snapshot import BUILT_IN_ESTIMATORS, MIN_GOODPUT, Job
from pollux_agent.model.throughput import MAX_GAMMA, MAX_SANE_S, MIN_GAMMA, MIN_SANE_S, ThroughputParams

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_COARSE, _FINE, _ROUNDS = 14, 6, 2
_CHUNK = 16_384
_EVERY_SAMPLE_COUNTS = 1e18
_seven = attrgetter(*ThroughputParams.__dataclass_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The goodput models of J jobs on T types of GPU.

    ``params`` (J, T, 7) in the order of :class:`ThroughputParams`; ``noise`` (J) in samples, huge where
    every sample counts; ``initial``, ``largest`` (J) total batch sizes, ``low`` (J) and ``high`` (J, T)
    samples per GPU; ``tuned`` (J) whether the batch size may change; ``single`` (J) whether one GPU needs
    accumulation to train above M0; ``fitted`` (J) whether times are known, ``known`` (J) whether goodput is;
    ``limit_s`` (J) latency promised, infinite where none is. ``curve`` (J) is the row of ``curves`` that a
    job's own estimator has said, -1 for none; shape (rows, T, one or several nodes, replicas).
    """

    params: Floats
    noise: Floats
    initial: Ints
    largest: Ints
    low: Ints
    high: Ints
    tuned: Bools
    single: Bools
    fitted: Bools
    known: Bools
    limit_s: Floats
    curve: Ints
    curves: Floats


def models_of(jobs: Sequence[Job], types: Sequence[str]) -> Models:
    """The models of a snapshot's jobs; what :func:`pollux.policy.models.job_models` is for one job.

    Unlike there, a job whose times were measured before its noise scale counts as training at M0.
    """
    params, fitted = params_of(jobs, types)
    curve, curves = _curves(jobs, types)
    told = curve >= 0
    fitted &= np.array([job.estimator in BUILT_IN_ESTIMATORS for job in jobs], dtype=np.bool_)
    training = np.array([job.estimator == "training" for job in jobs], dtype=np.bool_)
    latency = np.array([job.estimator == "latency" for job in jobs], dtype=np.bool_)
    adaptive = np.array([is_adaptive(job) for job in jobs], dtype=np.bool_)
    noise = np.array([np.nan if job.noise_scale is None else job.noise_scale for job in jobs])
    noise = np.where(training, noise, _EVERY_SAMPLE_COUNTS)
    initial = np.array([job.initial_batch_size for job in jobs], dtype=np.int64)
    low = np.array([job.min_local_batch_size for job in jobs], dtype=np.int64)
    promised = [job.latency_limit_s if job.estimator == "latency" else None for job in jobs]
    return Models(
        params=np.where(fitted[:, None, None], params, 1.0),
        noise=np.where(np.isnan(noise), _EVERY_SAMPLE_COUNTS, np.minimum(noise, _EVERY_SAMPLE_COUNTS)),
        initial=initial,
        largest=np.maximum([job.max_batch_size for job in jobs], initial),
        low=low,
        high=_local_limits(jobs, types),
        tuned=fitted & np.where(training, adaptive & ~np.isnan(noise), ~latency),
        single=training,
        fitted=fitted | told,
        known=(fitted & ~(training & adaptive & np.isnan(noise))) | told,
        limit_s=np.array([np.inf if limit is None else limit for limit in promised]),
        curve=curve,
        curves=curves,
    )


def is_adaptive(job: Job) -> bool:
    """Whether the job's batch size is ours to choose."""
    return job.kind in ("adaptive", "hybrid_parallel")


def params_of(jobs: Sequence[Job], types: Sequence[str]) -> tuple[Floats, Bools]:
    """Throughput parameters (J, T, 7) on each type of GPU, and which jobs (J) have any usable fit.

    On a type where nothing was measured a job counts as it does on the one where it ran on most GPUs. On a
    type where only one GPU was measured, synchronisation is as long, relative to computing, as there: Sia
    Eq. 1, xput_B(N) = xput_B(1) / xput_A(1) xput_A(N), for the local batch size that fits in memory.
    """
    kinds = sorted({*types, *(kind for job in jobs for kind in job.fits)})
    column = {kind: index for index, kind in enumerate(kinds)}
    params = np.full((len(jobs), len(kinds), 7), np.nan)
    seen = np.zeros((len(jobs), len(kinds)), dtype=np.int64)
    for row, job in enumerate(jobs):
        for kind, fit in job.fits.items():
            params[row, column[kind]] = _seven(fit)
            seen[row, column[kind]] = job.gpus_seen.get(kind, 0)
    usable = _are_sane(params)
    rows = np.arange(len(jobs))
    best = np.argmax(np.where(usable, seen, -1), axis=1)
    model, most = params[rows, best][:, None], seen[rows, best][:, None]
    local = _local_limits(jobs, kinds)
    alone = usable & (seen <= 1) & (most > 1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = _grad_s(params, local) / _grad_s(model, local)
        scaled = np.concatenate(
            [params[:, :, :2], model[:, :, 2:6] * ratio[:, :, None], params[:, :, 6:]], axis=2
        )
    scaled[:, :, 6] = model[:, :, 6]
    alone &= _are_sane(scaled)
    params = np.where(alone[:, :, None], scaled, params)
    params = np.where(usable[:, :, None], params, model)
    return params[:, [column[kind] for kind in types]], np.any(usable, axis=1)


def _curves(jobs: Sequence[Job], types: Sequence[str]) -> tuple[Ints, Floats]:
    """What own estimators said: the row of each job (J), -1 for none, and goodput (rows, T, 2, replicas)."""
    own = [row for row, job in enumerate(jobs) if job.estimates and job.estimator not in BUILT_IN_ESTIMATORS]
    said = [
        (place, column, curve)
        for place, row in enumerate(own)
        for column, kind in enumerate(types)
        if (curve := jobs[row].estimates.get(kind)) is not None
    ]
    width = max((max(len(each.one_node), len(each.several_nodes) + 1) for *_, each in said), default=0)
    curves = np.zeros((len(own), len(types), 2, width + 2))  # none for 0 replicas, nor beyond the last
    for place, column, curve in said:
        curves[place, column, 0, 1 : 1 + len(curve.one_node)] = curve.one_node
        curves[place, column, 1, 2 : 2 + len(curve.several_nodes)] = curve.several_nodes
    curves[curves < MIN_GOODPUT] = 0.0
    rows = np.full(len(jobs), -1, dtype=np.int64)
    rows[own] = np.arange(len(own))
    return rows, curves


def _local_limits(jobs: Sequence[Job], types: Sequence[str]) -> Ints:
    """Largest batch size of a GPU (J, T)."""
    limits = [[job.local_limit(kind) for kind in types] for job in jobs]
    return np.array(limits, dtype=np.int64).reshape(len(jobs), len(types))


def _grad_s(params: Floats, local: Ints) -> Floats:
    return np.asarray(params[:, :, 0] + params[:, :, 1] * local)


def _are_sane(params: Floats) -> Bools:
    """:func:`pollux_agent.model.throughput.is_sane` over the last axis."""
    with np.errstate(invalid="ignore", over="ignore"):
        sane = np.all((params[..., :6] >= 0) & (params[..., :6] <= MAX_SANE_S), axis=-1)
        sane &= (params[..., 6] >= MIN_GAMMA) & (params[..., 6] <= MAX_GAMMA)
        return np.asarray(sane & (params[..., 0] + params[..., 1] >= MIN_SANE_S))


def goodputs(models: Models, job: Ints, kind: Ints, nodes: Ints, replicas: Ints) -> Floats:
    """Goodput of job ``job[i]`` with ``replicas[i]`` replicas on ``nodes[i]`` nodes of type ``kind[i]``.

    Useful samples per second, 0 where no split of the batch is allowed. A job without a fit counts as scaling
    perfectly, in no unit. An inference with a promised latency has 1 where it keeps it (Sia section 3.4).
    What a job's own estimator said counts as it is.
    """
    values = np.zeros(len(job))
    for start in range(0, len(job), _CHUNK):
        part = slice(start, start + _CHUNK)
        values[part] = _Cells(models, job[part], kind[part], nodes[part], replicas[part]).best()
    own = np.flatnonzero(models.curve[job] >= 0)
    if len(own):
        count = np.minimum(replicas[own], models.curves.shape[3] - 1)
        spans = (nodes[own] > 1).astype(np.int64)
        values[own] = models.curves[models.curve[job[own]], kind[own], spans, count]
    return values


class _Cells:
    """A chunk of (job, type, nodes, replicas), with the arrays of its jobs side by side; shape (cells, 1)."""

    def __init__(self, models: Models, job: Ints, kind: Ints, nodes: Ints, replicas: Ints) -> None:
        self.tuned, self.fitted, self.single = models.tuned[job], models.fitted[job], models.single[job]
        self.initial, self.largest = models.initial[job][:, None], models.largest[job][:, None]
        self.low, self.high = models.low[job][:, None], models.high[job, kind][:, None]
        self.noise = models.noise[job][:, None]
        self.limit_s = models.limit_s[job]
        self.replicas = replicas[:, None]
        grad, slope, *sync, gamma = (models.params[job, kind, index][:, None] for index in range(7))
        across = nodes[:, None] > 1
        fixed, each = np.where(across, sync[2], sync[0]), np.where(across, sync[3], sync[1])
        self.alpha, self.beta, self.gamma = grad, slope, gamma
        self.sync = np.where(self.replicas > 1, fixed + each * np.maximum(self.replicas - 2, 0), 0.0)

    def best(self) -> Floats:
        """Goodput of the best split of each cell; shape (cells)."""
        local, steps = self._split(self.initial)
        local = np.maximum(local, self.low)
        local = np.minimum(local, self.largest // (self.replicas * (steps + 1)))
        fits = local >= self.low
        seconds = self._step_s(np.maximum(local, 1), steps)[:, 0]
        batch = (self.replicas * local * (steps + 1)).astype(np.float64)
        useful = np.minimum(batch, self.initial)
        tuned = self.tuned[:, None]
        useful = np.where(tuned, batch * np.minimum(self._efficiency(batch), 1.0), useful)[:, 0]
        value = np.where(self.fitted, useful / seconds, self.replicas[:, 0])
        value = np.where(fits[:, 0], value, 0.0)
        rows = np.flatnonzero(self.tuned & (self.largest > self.initial)[:, 0])
        if len(rows):
            value[rows] = np.maximum(value[rows], self._rows(rows)._tune())
        promised = np.isfinite(self.limit_s)
        kept = fits[:, 0] & (~self.fitted | (seconds <= self.limit_s))
        return np.where(promised, kept.astype(np.float64), value)

    def _rows(self, rows: Ints) -> "_Cells":
        part = object.__new__(_Cells)
        for name, value in vars(self).items():
            setattr(part, name, value[rows])
        return part

    def _tune(self) -> Floats:
        """Goodput of the best split with M0 < M <= limit: a geometric grid of M, refined twice.

        For given s goodput has one peak in m; either inside, which the grid finds, or at the largest m, so
        that one is tried for each s of the grid besides.
        """
        start, span = np.log(self.initial), np.log(self.largest / self.initial)
        left, right = np.zeros_like(span), np.ones_like(span)
        best = np.zeros(len(span))
        for turn in range(_ROUNDS + 1):
            points = np.linspace(0.0, 1.0, (_FINE if turn else _COARSE) + 2)
            points = points[1:-1] if turn else points
            where = left + (right - left) * points
            local, steps = self._split(np.rint(np.exp(start + span * where)).astype(np.int64))
            value = self._value(local, steps)
            if turn == 0:
                best = np.max(self._value(np.broadcast_to(self.high, steps.shape), steps), axis=1)
            best = np.maximum(best, np.max(value, axis=1))
            peak = np.take_along_axis(where, np.argmax(value, axis=1)[:, None], axis=1)
            step = (right - left) * (points[1] - points[0])
            left, right = np.maximum(peak - step, 0.0), np.minimum(peak + step, 1.0)
        return best

    def _split(self, batch: Ints) -> tuple[Ints, Ints]:
        """(m, s) of a total batch, rounded up; one GPU that trains above M0 accumulates at least once."""
        share = -(-batch // self.replicas)
        steps = -(-share // self.high) - 1
        alone = (self.replicas == 1) & (batch > self.initial) & self.single[:, None]
        steps = np.where(alone, np.maximum(steps, 1), steps)
        return np.asarray(-(-share // (steps + 1))), steps

    def _value(self, local: Ints, steps: Ints) -> Floats:
        """Goodput of splits as :meth:`_split` makes them, cut to the limit; 0 where not allowed."""
        parts = self.replicas * (steps + 1)
        local = np.minimum(np.clip(local, self.low, self.high), self.largest // parts)
        batch = parts * local
        alone = (parts == 1) & (batch > self.initial) & self.single[:, None]
        allowed = (local >= self.low) & (batch >= self.initial) & ~alone
        useful = batch * self._efficiency(batch.astype(np.float64))
        return np.where(allowed, useful / self._step_s(np.maximum(local, 1), steps), 0.0)

    def _efficiency(self, batch: Floats) -> Floats:
        """EFFICIENCY of Pollux Eq. 7."""
        return np.asarray((self.noise + self.initial) / (self.noise + np.maximum(batch, 1.0)))

    def _step_s(self, local: Ints, steps: Ints) -> Floats:
        """T_iter of Pollux Eq. 10 and 11, in seconds."""
        grad = self.alpha + self.beta * local
        longer = np.maximum(grad, self.sync)
        ratio = np.minimum(grad, self.sync) / longer
        return np.asarray(steps * grad + longer * (1.0 + ratio**self.gamma) ** (1.0 / self.gamma))
