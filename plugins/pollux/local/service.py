"""The local cluster itself: jobs, their drivers, and the rules by which they are submitted and changed."""

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pollux.cluster.base import (
    FINAL_PHASES,
    ClusterJob,
    ClusterView,
    JobIdentity,
    JobStatus,
    LogChunk,
    StopReason,
)
from pollux.cluster.driven import as_driven
from pollux.errors import Conflict, Refused, UnknownJob
from pollux.local.logs import read_logs
from pollux.local.store import JobStore, Lease
from pollux.local.workers import LocalWorkers, Site
from pollux_agent.driver import Driver, DriverState, Timing
from pollux_agent.protocol import Allocation, DriverEvent, JobSpec, Placement
from pollux_agent.records import append_line

logger = logging.getLogger(__name__)

_JOB_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_ABRUPT: frozenset[StopReason] = frozenset({"failed", "orphan"})


@dataclass(slots=True)
class _Entry:
    job: ClusterJob
    driver: Driver
    workers: LocalWorkers
    trouble: int | None = None


class LocalService:
    """All state of the service. Not for several threads: one loop calls everything.

    ``scripts`` is where relative script paths are looked up.
    """

    def __init__(self, *, store: JobStore, site: Site, timing: Timing, scripts: Path) -> None:
        self._store = store
        self._site = site
        self._timing = timing
        self._scripts = scripts
        self._entries = {job.job_id: self._entry(job, state) for job, state in store.load()}
        self._lease = store.lease()

    @property
    def busy(self) -> bool:
        """Whether any job is not final, so that time matters."""
        return any(not _is_final(entry.job) for entry in self._entries.values())

    @property
    def has_workers(self) -> bool:
        return any(entry.driver.state.placement for entry in self._entries.values())

    def tick(self, now_unix_s: float, *, closing: bool = False) -> None:
        """Let every driver take its turn; ``closing`` has all of them give their slots back.

        A job whose files cannot be written takes its turn again at the next tick, and harms no other.
        """
        for entry in self._entries.values():
            if _is_final(entry.job):
                continue
            try:
                self._tick(entry, now_unix_s, closing=closing)
                entry.trouble = None
            except OSError as error:
                if error.errno != entry.trouble:
                    logger.error("%s: waits until its files can be written: %s", entry.job.job_id, error)
                entry.trouble = error.errno

    def view(self, now_unix_s: float, *, every: bool = False) -> ClusterView:
        """Nodes and jobs, final jobs only with ``every``."""
        jobs = [
            self._current(entry, now_unix_s)
            for entry in self._entries.values()
            if every or not _is_final(entry.job)
        ]
        jobs.sort(key=lambda job: job.submitted_unix_s)
        return ClusterView(nodes=self._site.nodes.view(), jobs=tuple(jobs))

    def job(self, job_id: str, now_unix_s: float) -> ClusterJob:
        """One job as it is now; raises UnknownJob."""
        return self._current(self._find(job_id), now_unix_s)

    def submit(
        self,
        job_id: str,
        *,
        identity: JobIdentity,
        spec: JobSpec,
        run_id: str | None,
        fresh: bool,
        now_unix_s: float,
    ) -> ClusterJob:
        """Submit, re-attach or re-open, as ``JobControl.submit`` says; raises Refused."""
        entry = self._entries.get(job_id)
        if entry is not None and entry.job.identity != identity:
            raise Refused(f"job_id: {job_id!r} belongs to another task, {entry.job.identity}; use another")
        if entry is not None and self._stays(entry.job, spec, fresh=fresh):
            return self._current(entry, now_unix_s)
        script = self._check(job_id, spec)
        if entry is None:
            job = ClusterJob(
                job_id=job_id,
                identity=identity,
                spec=spec,
                submitted_unix_s=now_unix_s,
                mlflow_run_id=run_id,
            )
            unknown = self._store.new_driver(job_id)
            state = replace(unknown, since_unix_s=now_unix_s, message="waits for GPUs")
        else:
            self._store.go_on(job_id)
            job, state = _reopened(entry, spec=spec, run_id=run_id, now_unix_s=now_unix_s)
        self._store.save_spec(job_id, spec, script)
        if fresh:
            self._store.ask_fresh(job_id)
        self._store.save_driver(job_id, state)
        entry = self._put(job, state, entry)
        self._store.save_job(entry.job)
        submitted = DriverEvent(
            t_unix_s=now_unix_s,
            event="submit",
            incarnation=state.incarnation,
            decision=job.allocation.decision,
            message=f"submission {job.status.try_number}{', from nothing' if fresh else ''}",
        )
        append_line(self._store.folder(job_id).driver_events, submitted)
        return self._current(entry, now_unix_s)

    def patch_allocation(self, job_id: str, *, expected: int, allocation: Allocation) -> None:
        """Raises UnknownJob, Refused, or Conflict: another decision than ``expected`` is stored, or this one
        is older than the last one begun.
        """
        entry = self._find(job_id)
        stored = entry.job.allocation.decision
        if stored != expected:
            raise Conflict(f"{job_id}: decision {stored} is stored, not {expected}; observe again")
        if allocation.decision < max(stored, self._store.last_decision()):
            raise Conflict(f"{job_id}: decision {allocation.decision} is old, a newer one was begun")
        if _is_final(entry.job):
            raise Refused(f"{job_id}: the job is over ({entry.job.status.phase}); it can hold no GPUs")
        self._check_placement(entry.job.spec, allocation.placement)
        self._save(entry, replace(entry.job, allocation=allocation))

    def set_run(self, job_id: str, run_id: str) -> None:
        """Raises UnknownJob, or Conflict if another run is recorded."""
        entry = self._find(job_id)
        recorded = entry.job.mlflow_run_id
        if recorded not in (None, run_id):
            raise Conflict(f"{job_id}: run {recorded} is recorded already, not {run_id}")
        self._save(entry, replace(entry.job, mlflow_run_id=run_id))
        entry.workers.mlflow_run_id = run_id

    def stop(self, job_id: str, reason: StopReason, now_unix_s: float) -> ClusterJob:
        """Note the request to stop; an abrupt one outdoes one with a checkpoint. Raises UnknownJob."""
        entry = self._find(job_id)
        noted = entry.job.status.stop
        if not _is_final(entry.job) and (noted is None or (reason in _ABRUPT and noted not in _ABRUPT)):
            self._save(entry, replace(entry.job, status=replace(entry.job.status, stop=reason)))
        return self._current(entry, now_unix_s)

    def logs(self, job_id: str, cursor: str) -> LogChunk:
        """Raises UnknownJob, or Refused for a cursor that is none of ours."""
        self._find(job_id)
        return read_logs(self._store.folder(job_id), cursor)

    def held(self) -> Mapping[str, Placement]:
        """Slots that each job's processes occupy now."""
        return self._site.slots.held()

    def next_decision(self, above: int = 0) -> int:
        found = [above]
        for entry in self._entries.values():
            found += [entry.job.allocation.decision, entry.driver.state.acted_decision]
        return self._store.next_decision(found)

    def take_lease(self, holder: str, ttl_s: float, now_unix_s: float) -> None:
        """Raises Conflict while another holder has the lease; one that has more left than it was
        taken for is from before the clock was set back, and void.
        """
        lease = self._lease
        left_s = lease.until_unix_s - now_unix_s if lease is not None else 0.0
        if lease is not None and lease.holder != holder and 0.0 < left_s <= lease.ttl_s:
            raise Conflict(
                f"the scheduling lease is held by {lease.holder} for another {left_s:.0f} s at most"
            )
        lease = Lease(holder=holder, until_unix_s=now_unix_s + ttl_s, ttl_s=ttl_s)
        self._store.save_lease(lease)
        self._lease = lease

    def drop_lease(self, holder: str) -> None:
        """Give the lease back; nothing happens if it is somebody else's."""
        if self._lease is not None and self._lease.holder == holder:
            self._lease = None
            self._store.save_lease(None)

    def _tick(self, entry: _Entry, now_unix_s: float, *, closing: bool) -> None:
        """A job that is to start from nothing gives its slots back first, however it came by them."""
        job = entry.job
        before = entry.driver.state
        if before.phase == "waiting" and self._store.make_fresh(job.job_id):
            entry.driver.state = replace(before, best_step=0, failure=None)
        parks = closing or self._store.fresh_asked(job.job_id)
        wanted = replace(job.allocation, placement={}) if parks else job.allocation
        state = entry.driver.tick(now_unix_s=now_unix_s, allocation=wanted, stop=job.status.stop)
        if state == before and state.phase == job.status.phase:
            return
        if state.phase in FINAL_PHASES:
            job = replace(job, allocation=replace(job.allocation, placement={}))
        self._save(
            entry, replace(job, status=_status(job.status, state, self._held_by(job.job_id), now_unix_s))
        )

    def _entry(self, job: ClusterJob, state: DriverState) -> _Entry:
        folder = self._store.folder(job.job_id)
        workers = LocalWorkers(
            job_id=job.job_id,
            folder=folder,
            site=self._site,
            env=job.spec.env,
            mlflow_run_id=job.mlflow_run_id or "",
        )
        driver = Driver(
            folder=folder,
            workers=workers,
            state=state,
            save=lambda state: self._store.save_driver(job.job_id, state),
            timing=self._timing,
        )
        return _Entry(job, driver, workers)

    def _put(self, job: ClusterJob, state: DriverState, entry: _Entry | None) -> _Entry:
        """Keep a submitted job; workers that still stop stay with it."""
        if entry is None:
            entry = self._entries[job.job_id] = self._entry(job, state)
        entry.driver.state = state
        entry.workers.env = job.spec.env
        entry.workers.mlflow_run_id = job.mlflow_run_id or ""
        held = self._held_by(job.job_id)
        entry.job = replace(job, status=_status(job.status, state, held, state.since_unix_s))
        return entry

    def _save(self, entry: _Entry, job: ClusterJob) -> None:
        entry.job = job
        self._store.save_job(job)

    def _find(self, job_id: str) -> _Entry:
        entry = self._entries.get(job_id)
        if entry is None:
            raise UnknownJob(f"there is no job {job_id!r} on this cluster")
        return entry

    def _current(self, entry: _Entry, now_unix_s: float) -> ClusterJob:
        job = entry.job
        if _is_final(job):
            return job
        held = self._held_by(job.job_id)
        return replace(job, status=_status(job.status, entry.driver.state, held, now_unix_s))

    def _held_by(self, job_id: str) -> Placement:
        return self._site.slots.held().get(job_id, {})

    @staticmethod
    def _stays(job: ClusterJob, spec: JobSpec, *, fresh: bool) -> bool:
        """Whether a submission finds the job as it is: it is active, or done and asked for nothing more."""
        if _is_final(job):
            return job.status.phase == "done" and not fresh and not spec.extends(job.spec)
        return job.status.stop is None

    def _check(self, job_id: str, spec: JobSpec) -> Path:
        """The script's path; raises Refused naming field, value and fix."""
        if _JOB_ID.fullmatch(job_id) is None:
            raise Refused(f"job_id: {job_id[:80]!r} is no DNS label; use a-z, 0-9 and '-', 63 at most")
        script = _file(self._scripts, spec.script)
        if script is None:
            raise Refused(
                f"script: there is no file {spec.script[:200]!r}; name an existing Python file, "
                f"relative to {str(self._scripts)!r} or absolute"
            )
        slots = Counter[str]()
        for node in self._site.nodes.nodes:
            slots[node.gpu_type] += node.slots
        usable = [count for kind, count in slots.items() if not spec.gpu_types or kind in spec.gpu_types]
        if not usable:
            raise Refused(
                f"gpu_types: {', '.join(spec.gpu_types)}, but the cluster has {', '.join(sorted(slots))} only"
            )
        if spec.min_gpus > max(usable):
            raise Refused(
                f"min_gpus: {spec.min_gpus}, but the cluster has {max(usable)} of one type that the job may "
                f"use; lower it to {max(usable)} or less"
            )
        return script

    def _check_placement(self, spec: JobSpec, placement: Placement) -> None:
        for name, gpus in placement.items():
            node = self._site.nodes.node(name)
            if node is None or gpus > node.slots:
                has = "is none of ours" if node is None else f"has {node.slots} slots"
                raise Refused(f"placement: {gpus} GPUs on {name!r}, which {has}")
        total = sum(placement.values())
        if placement and not spec.min_gpus <= total <= spec.max_gpus:
            raise Refused(
                f"placement: {total} GPUs for a job of {spec.min_gpus} to {spec.max_gpus}; give as many, or 0"
            )


def _file(folder: Path, name: str) -> Path | None:
    """The file of that name, None also where no file can have it: too long, or in the home of nobody."""
    try:
        path = folder / Path(name).expanduser()
        return path.resolve() if path.is_file() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _is_final(job: ClusterJob) -> bool:
    return job.status.phase in FINAL_PHASES


def _reopened(
    entry: _Entry, *, spec: JobSpec, run_id: str | None, now_unix_s: float
) -> tuple[ClusterJob, DriverState]:
    """A final job, or one that was asked to stop, as it is after a new submission."""
    job, state = entry.job, entry.driver.state
    status = replace(job.status, stop=None, outcome=None, final=False, try_number=job.status.try_number + 1)
    job = replace(job, spec=spec, mlflow_run_id=run_id or job.mlflow_run_id, status=status)
    state = replace(state, outcome=None, final=False, fruitless_starts=0, retry_unix_s=0.0)
    if state.phase in FINAL_PHASES:
        state = replace(
            state, phase="waiting", since_unix_s=now_unix_s, message="submitted again; waits for GPUs"
        )
    return job, state


def _status(status: JobStatus, state: DriverState, held: Placement, now_unix_s: float) -> JobStatus:
    return replace(as_driven(status, state, held=held), attained_gpu_s=state.attained(now_unix_s))
