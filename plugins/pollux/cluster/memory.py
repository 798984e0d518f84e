"""A cluster in memory: the same contract as the real ones, over workers that only count their GPUs."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

from pollux.cluster.base import (
    FINAL_PHASES,
    ClusterJob,
    ClusterView,
    JobIdentity,
    JobStatus,
    LogChunk,
    Phase,
    StopReason,
)
from pollux.cluster.numbers import next_number
from pollux.errors import Conflict, Refused, UnknownJob
from pollux.snapshot import Node
from pollux_agent.protocol import Allocation, JobSpec, Placement

Hook = Callable[[str], None]


def _ignore(method: str) -> None:
    """The hook that does nothing."""


class MemoryCluster:
    """Cluster and JobControl in one, for tests and simulation.

    Every call moves the workers on by one tick. A job whose allocation changed gives its old GPUs back
    ``lag`` ticks later and, once the new ones are free, takes those ``lag`` ticks after that; at lag 0
    both happen at once. ``before`` and ``after`` are called with the method's name around its effect and may
    raise, as a caller that dies there would.
    """

    patches_at_once = 1

    def __init__(
        self,
        nodes: tuple[Node, ...],
        *,
        lag: int = 0,
        clock: Callable[[], float] = time.time,
        before: Hook = _ignore,
        after: Hook = _ignore,
    ) -> None:
        self.before = before
        self.after = after
        self._nodes = {node.name: node for node in nodes}
        self.lag = lag
        self._clock = clock
        self._jobs: dict[str, ClusterJob] = {}
        self._waits: dict[str, int] = {}
        self._decision = 0
        self._lease: tuple[str, float] | None = None
        self._lock = threading.RLock()

    # --- Cluster

    @contextmanager
    def lease(self, holder: str, ttl: timedelta) -> Iterator[None]:
        with self._call("lease"):
            now = self._clock()
            if self._lease is not None and self._lease[0] != holder and now < self._lease[1]:
                raise Conflict(f"{self._lease[0]} holds the scheduling lease")
            self._lease = (holder, now + ttl.total_seconds())
        try:
            yield
        finally:
            with self._call("release"):
                if self._lease is not None and self._lease[0] == holder:
                    self._lease = None

    def next_decision(self, above: int = 0) -> int:
        with self._call("next_decision"):
            on_jobs = [job.allocation.decision for job in self._jobs.values()]
            self._decision = next_number(self._decision, [above, *on_jobs])
            return self._decision

    def observe(self) -> ClusterView:
        with self._call("observe"):
            active = (job for job in self._jobs.values() if job.status.phase not in FINAL_PHASES)
            return ClusterView(
                nodes=tuple(self._nodes.values()),
                jobs=tuple(sorted(active, key=lambda job: (job.submitted_unix_s, job.job_id))),
            )

    def patch_allocation(self, job_id: str, *, expected: int, allocation: Allocation) -> None:
        with self._call("patch_allocation"):
            job = self._find(job_id)
            if job.allocation.decision != expected:
                raise Conflict(f"job {job_id} is at decision {job.allocation.decision}, not {expected}")
            if allocation.decision < self._decision:
                raise Conflict(f"decision {allocation.decision} is old: {self._decision} was given out")
            if job.status.phase in FINAL_PHASES:
                raise Refused(f"job {job_id} is over ({job.status.phase})")
            for name, gpus in allocation.placement.items():
                if name not in self._nodes or gpus > self._nodes[name].gpus:
                    raise Refused(f"there are no {gpus} GPUs on node {name!r}")
            self._jobs[job_id] = replace(job, allocation=allocation)

    def set_run(self, job_id: str, run_id: str) -> None:
        with self._call("set_run"):
            job = self._find(job_id)
            if job.mlflow_run_id not in (None, run_id):
                raise Conflict(f"job {job_id} has MLflow run {job.mlflow_run_id} already")
            self._jobs[job_id] = replace(job, mlflow_run_id=run_id)

    def held(self) -> Mapping[str, Placement]:
        with self._call("held"):
            return {job_id: job.status.held for job_id, job in self._jobs.items() if job.status.held}

    # --- JobControl

    def submit(
        self, job_id: str, *, identity: JobIdentity, spec: JobSpec, run_id: str | None, fresh: bool = False
    ) -> ClusterJob:
        with self._call("submit"):
            old = self._jobs.get(job_id)
            if old is None:
                self._jobs[job_id] = ClusterJob(
                    job_id=job_id,
                    identity=identity,
                    spec=spec,
                    submitted_unix_s=self._clock(),
                    mlflow_run_id=run_id,
                    status=JobStatus(since_unix_s=self._clock()),
                )
            elif _may_reopen(old, spec, fresh=fresh):
                status = replace(
                    old.status,
                    phase="waiting" if old.status.phase in FINAL_PHASES else old.status.phase,
                    since_unix_s=self._clock(),
                    message="",
                    outcome=None,
                    final=False,
                    stop=None,
                    try_number=old.status.try_number + 1,
                )
                self._jobs[job_id] = replace(
                    old, spec=spec, mlflow_run_id=run_id or old.mlflow_run_id, status=status
                )
            return self._jobs[job_id]

    def job(self, job_id: str) -> ClusterJob:
        with self._call("job"):
            return self._find(job_id)

    def stop(self, job_id: str, reason: StopReason) -> ClusterJob:
        with self._call("stop"):
            job = self._find(job_id)
            if job.status.phase not in FINAL_PHASES and job.status.stop is None:
                self._jobs[job_id] = replace(job, status=replace(job.status, stop=reason))
                self._waits.pop(job_id, None)
            return self._jobs[job_id]

    def logs(self, job_id: str, cursor: str = "") -> LogChunk:
        with self._call("logs"):
            self._find(job_id)
            return LogChunk(lines=(), cursor=cursor)

    # --- the world outside

    @property
    def jobs(self) -> tuple[ClusterJob, ...]:
        """Every job, final or not, as it is; the workers do not move on."""
        return tuple(self._jobs.values())

    def end(self, job_id: str, phase: Phase = "done") -> None:
        """The job's workers come to their end by themselves."""
        with self._lock:
            self._end(self._find(job_id).job_id, phase)

    # --- workers

    @contextmanager
    def _call(self, method: str) -> Iterator[None]:
        self.before(method)
        with self._lock:
            self._tick()
            yield
        self.after(method)

    def _find(self, job_id: str) -> ClusterJob:
        if job_id not in self._jobs:
            raise UnknownJob(f"the cluster has no job {job_id!r}")
        return self._jobs[job_id]

    def _tick(self) -> None:
        active = [job_id for job_id, job in self._jobs.items() if job.status.phase not in FINAL_PHASES]
        for step in (self._release, self._take):
            for job_id in active:
                step(self._jobs[job_id])

    def _release(self, job: ClusterJob) -> None:
        wanted = {} if job.status.stop else job.allocation.placement
        if job.status.held and job.status.held != wanted:
            self._set(job.job_id, "stopping", job.status.held)
            if self._waited(job.job_id):
                self._set(job.job_id, "waiting", {})
        if job.status.stop and not self._jobs[job.job_id].status.held:
            self._end(job.job_id, "ended")

    def _take(self, job: ClusterJob) -> None:
        wanted = job.allocation.placement
        if job.status.phase in FINAL_PHASES or job.status.held or not wanted:
            return
        if all(gpus <= self._free(name) for name, gpus in wanted.items()):
            self._set(job.job_id, "starting", {})
            if self._waited(job.job_id):
                self._set(job.job_id, "running", wanted)

    def _waited(self, job_id: str) -> bool:
        waited = self._waits.pop(job_id, 0)
        if waited >= self.lag:
            return True
        self._waits[job_id] = waited + 1
        return False

    def _free(self, name: str) -> int:
        used = sum(job.status.held.get(name, 0) for job in self._jobs.values())
        return (self._nodes[name].gpus if name in self._nodes else 0) - used

    def _set(self, job_id: str, phase: Phase, held: Placement) -> None:
        job = self._jobs[job_id]
        old, now = job.status, self._clock()
        if (old.phase, old.held) == (phase, held):
            return
        status = replace(
            old,
            phase=phase,
            held=held,
            since_unix_s=now,
            attained_gpu_s=old.attained_gpu_s + sum(old.held.values()) * max(0.0, now - old.since_unix_s),
        )
        if phase == "running":
            status = replace(
                status,
                incarnation=old.incarnation + 1,
                restarts=old.incarnation,
                acted_decision=job.allocation.decision,
                max_gpus_seen=max(old.max_gpus_seen, sum(held.values())),
            )
        self._jobs[job_id] = replace(job, status=status)

    def _end(self, job_id: str, phase: Phase) -> None:
        self._waits.pop(job_id, None)
        self._set(job_id, phase, {})
        job = self._jobs[job_id]
        self._jobs[job_id] = replace(job, allocation=replace(job.allocation, placement={}))


def _may_reopen(job: ClusterJob, spec: JobSpec, *, fresh: bool) -> bool:
    """Whether a new submission starts the job again: it is over or was asked to end; done only if fresh, or
    asked for more.
    """
    if job.status.phase in FINAL_PHASES:
        return fresh or job.status.phase != "done" or spec.extends(job.spec)
    return job.status.stop is not None
