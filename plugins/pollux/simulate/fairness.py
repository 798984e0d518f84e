"""Finish-time fairness: how long a job took against how long it would have taken on its share alone."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from pollux.simulate.job import SimulatedJob
from pollux.simulate.setup import ClusterSetup
from pollux.simulate.split import packed, split_batch
from pollux.traces import Application

Floats = NDArray[np.float64]

_BATCHES = 50
"""Total batch sizes tried, in geometric steps from the least to the largest one."""


@dataclass(slots=True)
class Isolation:
    """Times of jobs that have a part of the cluster to themselves.

    Alone a job starts on one GPU and doubles at each decision until it has its part, a restart each time;
    it trains at the best batch size of each epoch throughout.
    """

    cluster: ClusterSetup
    interval_s: float = 60.0
    _known: dict[tuple[str, str, int], Floats] = field(default_factory=dict)

    def seconds(self, job: SimulatedJob, gpus: float) -> float:
        """From first start to end on ``gpus``: linear between whole numbers, below one in proportion.

        With several types of GPU, the time at the mean speed of those that the application was measured on,
        weighted by how many the cluster has.
        """
        weights = {kind: self.cluster.gpus_of[kind] for kind in job.app.times}
        speed = sum(weight / self._on_type(job, kind, gpus) for kind, weight in weights.items())
        return sum(weights.values()) / speed

    def _on_type(self, job: SimulatedJob, gpu_type: str, gpus: float) -> float:
        if gpus <= 1:
            return self._whole(job, gpu_type, 1) / gpus
        low, high = floor(gpus), ceil(gpus)
        times = self._whole(job, gpu_type, low), self._whole(job, gpu_type, high)
        return times[0] + (gpus - low) * (times[1] - times[0])

    def _whole(self, job: SimulatedJob, gpu_type: str, gpus: int) -> float:
        gpus = 1 if job.app.single_gpu else min(gpus, max(self.cluster.most_gpus(gpu_type), 1))
        now_s, done, size = 0.0, 0.0, 1
        while size < gpus:
            useful_s = max(self.interval_s - job.restart_s, 0.0) / job.divisor
            left = np.interp(done, [0.0, *job.app.progress], [0.0, *self._times(job.app, gpu_type, size)])
            total = self._times(job.app, gpu_type, size)
            if left + useful_s >= total[-1]:
                return float(now_s + job.restart_s + (total[-1] - left) * job.divisor)
            done = float(np.interp(left + useful_s, [0.0, *total], [0.0, *job.app.progress]))
            now_s += self.interval_s
            size = min(2 * size, gpus)
        total = self._times(job.app, gpu_type, gpus)
        spent = np.interp(done, [0.0, *job.app.progress], [0.0, *total])
        return float(now_s + job.restart_s + (total[-1] - spent) * job.divisor)

    def _times(self, app: Application, gpu_type: str, gpus: int) -> Floats:
        """Seconds from the beginning to the end of each epoch on a fixed number of GPUs."""
        key = (app.name, gpu_type, gpus)
        if key not in self._known:
            shape = packed(gpus, self.cluster.width_of[gpu_type])
            self._known[key] = np.cumsum(best_seconds(app, gpu_type, shape))
        return self._known[key]


def best_seconds(app: Application, gpu_type: str, shape: tuple[int, ...]) -> Floats:
    """Seconds of each epoch on a placement with the best batch size; truth, not a fit."""
    gpus = sum(shape)
    low, _ = app.local_bounds(gpu_type)
    least = min(max(app.initial_batch_size, low * gpus), app.max_batch_size)
    sizes = [app.max_batch_size] if app.single_gpu else np.geomspace(least, app.max_batch_size, _BATCHES)
    progress = np.diff(app.progress, prepend=0.0)
    best: Floats = np.full(app.epochs, np.inf)
    for local, steps in dict.fromkeys(split_batch(app, gpu_type, round(size), gpus) for size in sizes):
        if local < 1:
            continue
        step_s, sync_s = app.step_times(gpu_type, shape, local)
        batch = gpus * local * (steps + 1)
        square, variance = np.array([app.gradients(epoch, batch) for epoch in range(app.epochs)]).T
        gain = (variance + square) / (variance * app.initial_batch_size / batch + square)
        best = np.minimum(best, progress * (step_s + steps * (step_s - sync_s)) / gain)
    return best


def fairness(
    jobs: Sequence[SimulatedJob], cluster: ClusterSetup, *, interval_s: float = 60.0
) -> Mapping[str, float]:
    """Finish-time fairness rho of each job that finished (Themis; Sia section 5): above 1 is unfair.

    The share of a job is the cluster's GPUs over the mean number of jobs beside it, itself included, during
    its life.
    """
    isolation, gpus = Isolation(cluster, interval_s), sum(cluster.gpus_of.values())
    crowd = _Crowd(jobs)
    rho = {}
    for job in jobs:
        if job.completed_s is not None:
            start_s = job.request.submitted_s
            share = gpus / crowd.mean(start_s, job.completed_s)
            rho[job.request.name] = (job.completed_s - start_s) / isolation.seconds(job, share)
    return rho


class _Crowd:
    """How many jobs are in the system at which time."""

    def __init__(self, jobs: Sequence[SimulatedJob]) -> None:
        ends = [job.completed_s for job in jobs if job.completed_s is not None]
        events = [(job.request.submitted_s, 1) for job in jobs] + [(end, -1) for end in ends]
        events.sort()
        self._times = [time for time, _ in events]
        self._counts = np.cumsum([change for _, change in events]).tolist()

    def mean(self, start_s: float, end_s: float) -> float:
        if end_s <= start_s:
            return 1.0
        first, last = bisect_right(self._times, start_s), bisect_left(self._times, end_s)
        edges = [start_s, *self._times[first:last], end_s]
        counts = self._counts[first - 1 : last]
        area = sum(count * width for count, width in zip(counts, np.diff(edges), strict=True))
        return max(float(area / (end_s - start_s)), 1.0)
