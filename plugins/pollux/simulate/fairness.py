"""Finish-time fairness: how long a job took against how long it would have taken on its share alone."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

import numpy as np

from pollux.errors import TraceError
from pollux.simulate.agent import Knowledge, SimulatedAgent
from pollux.simulate.job import MAX_GPUS, SimulatedJob, limits_of
from pollux.simulate.setup import ClusterSetup
from pollux.simulate.split import packed

_LONGEST_S = 10 * 365 * 86400.0

_Key = tuple[str, str, int, float, float]


@dataclass(slots=True)
class Isolation:
    """Times of jobs that have a part of the cluster to themselves, each simulated as in the cluster.

    The job waits for the first decision after its submission, starts on one GPU and doubles at each decision
    until it has its part, with a restart each time; its agent measures, fits and tunes the batch size, from
    nothing. One of a fixed size or batch size is compared with what it could have been.
    """

    cluster: ClusterSetup
    interval_s: float = 60.0
    _known: dict[_Key, float] = field(default_factory=dict)

    def seconds(self, job: SimulatedJob, gpus: float) -> float:
        """From submission to end on ``gpus``: linear between whole numbers, below one in proportion.

        With several types of GPU, the time by which rho is the mean of those on each type that the
        application was measured on, weighted by how many the cluster has; Sia Eq. 6.
        """
        weights = {kind: self.cluster.gpus_of[kind] for kind in job.app.times}
        rate = sum(weight / self._on_type(job, kind, gpus) for kind, weight in weights.items())
        return sum(weights.values()) / rate

    def _on_type(self, job: SimulatedJob, gpu_type: str, gpus: float) -> float:
        submitted_s = job.request.submitted_s
        gpus /= job.app.gpus_per_replica(gpu_type)
        wait_s = max(ceil(submitted_s / self.interval_s), 1) * self.interval_s - submitted_s
        if gpus <= 1:
            return (wait_s + self._whole(job, gpu_type, 1)) / gpus
        low, high = floor(gpus), ceil(gpus)
        times = self._whole(job, gpu_type, low), self._whole(job, gpu_type, high)
        return wait_s + times[0] + (gpus - low) * (times[1] - times[0])

    def _whole(self, job: SimulatedJob, gpu_type: str, gpus: int) -> float:
        """From first start to end on so many GPUs, or replicas of a pipeline."""
        app = job.app
        most = 1 if app.single_gpu else min(self.cluster.most_gpus(gpu_type), MAX_GPUS)
        most = min(
            most // app.gpus_per_replica(gpu_type), app.max_batch_size // app.local_bounds(gpu_type)[0]
        )
        key = (app.name, gpu_type, min(gpus, max(most, 1)), job.restart_s, job.divisor)
        if key not in self._known:
            self._known[key] = self._simulate(job, gpu_type, key[2])
        return self._known[key]

    def _simulate(self, job: SimulatedJob, gpu_type: str, gpus: int) -> float:
        width = self.cluster.width_of[gpu_type]
        alone = SimulatedJob(
            request=job.request,
            app=job.app,
            kind="rigid" if job.app.single_gpu else "hybrid_parallel" if job.app.is_pipeline else "adaptive",
            profiled=True,
            agent=SimulatedAgent(limits_of(job.app), Knowledge()),
            restart_s=job.restart_s,
            batch_size=job.app.max_batch_size,
            divisor=job.divisor,
        )
        now_s, size = 0.0, 0
        while alone.completed_s is None:
            if now_s > _LONGEST_S:
                raise TraceError(
                    f"application {job.app.name!r} does not end in {_LONGEST_S / 86400:.0f} days on {gpus} "
                    f"GPUs of type {gpu_type!r}; check its validation files and goodput_divisor"
                )
            if size < gpus:
                size = min(max(2 * size, 1), gpus)
                shape = packed(size * job.app.gpus_per_replica(gpu_type), width)
                alone.place({f"n{node}": count for node, count in enumerate(shape)}, gpu_type, now_s)
            alone.advance(now_s, self.interval_s, 0.0)
            now_s += self.interval_s
        return alone.completed_s


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
