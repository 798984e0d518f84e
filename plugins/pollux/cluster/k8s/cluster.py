"""The cluster itself: what a cycle observes and patches, and what the operator submits, over the real API."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from pollux.cluster.base import (
    FINAL_PHASES,
    ClusterJob,
    ClusterView,
    JobIdentity,
    LogChunk,
    StopReason,
)
from pollux.cluster.k8s import events, jobs, podlog
from pollux.cluster.k8s.calls import translated
from pollux.cluster.k8s.claim import Claim
from pollux.cluster.k8s.lease import SchedulingLease
from pollux.cluster.k8s.nodes import held_by_jobs, read_books, unix_s
from pollux.cluster.k8s.settings import KubeSettings
from pollux.cluster.k8s.submit import Submitter, is_overdue
from pollux.errors import Conflict, DriverLost, Refused, UnknownJob
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube import notes
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path
from pollux_agent.driver.kube.notes import or_else
from pollux_agent.driver.kube.trouble import pod_trouble
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, JobSpec, Placement, encode, read_decision

logger = logging.getLogger(__name__)

Json = Mapping[str, Any]

_NOT_ENDED = "status.phase!=Succeeded,status.phase!=Failed"
_NOT_RUNNING = "status.phase!=Running"
_DRIVERS = f"{doc.ROLE}={doc.DRIVER_ROLE}"
_WORKERS = f"{doc.ROLE}={doc.WORKER_ROLE}"
_LEAST_VIEW_AGE_S = 1.0
_TELLERS = 3
"""Threads that write events, so that nothing waits for them but the end of the lease."""
_ABRUPT: frozenset[StopReason] = frozenset({"failed", "orphan"})
_SEEN_AGAIN_S = 5.0


class KubeCluster:
    """Cluster and JobControl. ``namespace`` binds it to one namespace, as an operator's; a scheduler's looks
    for jobs in all. ``user_pod`` gives the pod that a submitted job's workers are made from, ``claim`` says
    whose the name is that a scheduler has.

    Under the lease a view is used for a second, or for as long as it took to get where that is longer, with
    this cluster's own patches applied, so that a cycle's number of calls does not grow with its number of
    changes. Patches may come from several threads.
    """

    patches_at_once = 8

    def __init__(
        self,
        api: KubeApi,
        settings: KubeSettings,
        *,
        namespace: str | None = None,
        user_pod: Callable[[], Json] | None = None,
        mlflow_tracking_uri: str = "",
        claim: Claim | None = None,
    ) -> None:
        self.api = api
        self._settings = settings
        self._namespace = namespace
        self._lease = SchedulingLease(api, settings.lease_in, claim)
        self._submitter = Submitter(api, settings, namespace, user_pod, mlflow_tracking_uri)
        self._leased = False
        self._tellers: ThreadPoolExecutor | None = None
        self._given_out: tuple[int, float] | None = None
        self._view: tuple[ClusterView, float] | None = None
        """The last view, and when it is too old."""
        self._drivers: dict[str, Json] = {}
        self._numbers: list[int] = []
        self._lost: frozenset[str] = frozenset()
        self._changing, self._asking = threading.Lock(), threading.Lock()

    # --- Cluster

    @contextmanager
    def lease(self, holder: str, ttl: timedelta) -> Iterator[None]:
        with translated("lease"):
            held = self._lease.hold(holder, ttl)
            held.__enter__()
        self._leased, self._view, self._given_out = True, None, None
        try:
            with ThreadPoolExecutor(_TELLERS, "pollux-events") as self._tellers:
                yield
        finally:
            self._leased, self._view, self._tellers = False, None, None
            held.__exit__(None, None, None)

    def next_decision(self, above: int = 0) -> int:
        self.observe()
        with translated("decision number"):
            number = self._lease.next_decision([above, *self._numbers])
        self._given_out = (number, time.monotonic())
        self._mend_allocations(number)
        self._tell_lost()
        return number

    def observe(self) -> ClusterView:
        began_s = time.monotonic()
        if self._view is not None and self._leased and began_s < self._view[1]:
            return self._view[0]
        with translated("observe"):
            nodes = list(self.api.items("/api/v1/nodes"))
            pods = list(self.api.items("/api/v1/pods", fieldSelector=_NOT_ENDED))
            quotas = self._quotas()
        now = self.api.server_unix_s
        claims = [pod for pod in pods if _is_active_driver(pod)]
        found = jobs.read_jobs(claims, now_unix_s=now)
        for name, why in found.left_out.items():
            logger.error("Pod %s is left out: %s", name, why)
        books = read_books(
            nodes,
            pods,
            quotas,
            jobs={job_id: pod["metadata"]["namespace"] for job_id, pod in found.pods.items()},
            settings=self._settings,
            now_unix_s=now,
        )
        self._drivers, self._lost = dict(found.pods), books.lost
        self._numbers = [number for pod in claims for number in jobs.numbers_of(pod)]
        active = [_holding(job, books.held.get(job_id, {})) for job_id, job in found.jobs.items()]
        active.sort(key=lambda job: (job.submitted_unix_s, job.job_id))
        view = ClusterView(nodes=books.nodes, jobs=tuple(active))
        seen_s = time.monotonic()
        self._view = (view, seen_s + max(_LEAST_VIEW_AGE_S, seen_s - began_s))
        return view

    def patch_allocation(self, job_id: str, *, expected: int, allocation: Allocation) -> None:
        pod = self._drivers.get(job_id) if self._leased else None
        pod = pod or self._driver(job_id)
        stored = _stored(pod)
        if stored != expected and not self._leased:
            raise Conflict(f"{job_id}: decision {stored} is stored, not {expected}; observe again")
        if allocation.decision < max(expected, self._last_decision()):
            raise Conflict(f"{job_id}: decision {allocation.decision} is old, a newer one was begun")
        if jobs.is_over(pod) or jobs.is_abandoned(pod):
            raise Refused(f"{job_id}: the job is over; it can hold no GPUs")
        self._check_placement(allocation.placement)
        before = jobs.allocation_of(pod).placement
        patched = self._patch(pod, job_id, expected, allocation)
        if self._tellers is not None:
            self._tellers.submit(events.tell, self.api, pod, before, allocation)
        else:
            events.tell(self.api, pod, before, allocation)
        self._remember(job_id, patched, allocation)

    def set_run(self, job_id: str, run_id: str) -> None:
        pod = self._driver(job_id)
        recorded = or_else(notes.run_of, doc.annotations(pod), "")
        if recorded == run_id:
            return
        if recorded:
            raise Conflict(f"{job_id}: run {recorded} is recorded already, not {run_id}")
        self._change(pod, job_id, doc.RUN, run_id)

    def held(self) -> Mapping[str, Placement]:
        with translated("held"):
            pods = list(self.api.items(self._pods, labelSelector=_WORKERS, fieldSelector=_NOT_ENDED))
        return held_by_jobs(pods, self._settings.gpu_resources)

    # --- JobControl

    def submit(
        self, job_id: str, *, identity: JobIdentity, spec: JobSpec, run_id: str | None, fresh: bool = False
    ) -> ClusterJob:
        with translated(f"submit {job_id}", writes=True):
            pod = self._submitter.submit(job_id, identity=identity, spec=spec, run_id=run_id, fresh=fresh)
        return jobs.job_of(pod, now_unix_s=self.api.server_unix_s)

    def job(self, job_id: str) -> ClusterJob:
        pod = self._driver(job_id)
        job = _readable(pod, self.api.server_unix_s)
        if job.status.phase in FINAL_PHASES:
            return job
        if not _is_lost(pod, self.api.server_unix_s):
            return self._unless_never_starts(job, pod)
        if job.status.stop is not None:
            return replace(job, status=replace(job.status, phase="ended", held={}))
        raise DriverLost(f"the driver of {job_id} is gone: {_end_of(pod)}")

    def stop(self, job_id: str, reason: StopReason) -> ClusterJob:
        pod = self._driver(job_id)
        noted = or_else(notes.stop_of, doc.annotations(pod), None)
        if not jobs.is_over(pod) and (noted is None or (reason in _ABRUPT and noted not in _ABRUPT)):
            pod = self._change(pod, job_id, doc.STOP, reason)
        if jobs.is_abandoned(pod):
            self._end_workers_of(pod)
        return _readable(pod, self.api.server_unix_s)

    def logs(self, job_id: str, cursor: str = "") -> LogChunk:
        pod = self._driver(job_id)
        with translated(f"logs of {job_id}"):
            return podlog.read(self.api, pod, cursor)

    # --- more than the protocols ask for

    def every_job(self) -> ClusterView:
        """As :meth:`observe`, but with the jobs that are over and whose pod is still there."""
        view = self.observe()
        with translated("jobs"):
            pods = list(self.api.items(self._pods, labelSelector=_DRIVERS))
        known = {job.job_id for job in view.jobs}
        over = jobs.read_jobs(
            [pod for pod in pods if pod["metadata"]["name"] not in known], now_unix_s=self.api.server_unix_s
        )
        every = sorted([*view.jobs, *over.jobs.values()], key=lambda job: job.submitted_unix_s)
        return ClusterView(nodes=view.nodes, jobs=tuple(every))

    def is_closing(self, job_id: str) -> bool:
        """Whether the job is over but its driver at work, as while it sends the last figures to MLflow."""
        pod = self._driver(job_id)
        ends = doc.is_terminal(pod) or pod["metadata"].get("deletionTimestamp")
        return jobs.is_over(pod) and not ends

    def left(self, deployment: str) -> Mapping[str, ClusterJob]:
        """A deployment's jobs that are over and have a pod that nobody needs but who has yet to hear of their
        end, by the pod's uid.
        """
        selector = f"{_DRIVERS},{doc.DEPLOYMENT}={deployment},{doc.FINISH}"
        with translated("jobs that are over"):
            pods = list(self.api.items(self._pods, labelSelector=selector, fieldSelector=_NOT_RUNNING))
        left = {pod["metadata"]["uid"]: jobs.left_by(pod, self.api.server_unix_s) for pod in pods}
        return {uid: job for uid, job in left.items() if job is not None}

    def remove(self, job_id: str, *, uid: str = "") -> None:
        """Delete a job's driver pod (with ``uid`` no other), and so all that is left of it but its folder."""
        pod = self._driver(job_id)
        with translated(f"remove {job_id}", job_id=job_id, writes=True):
            self.api.delete(_path(pod), uid=uid or pod["metadata"]["uid"])

    # --- within

    @property
    def _pods(self) -> str:
        return pod_path(self._namespace) if self._namespace else "/api/v1/pods"

    def _driver(self, job_id: str) -> Json:
        """The job's driver pod as it is now; raises UnknownJob."""
        with translated(f"job {job_id}", job_id=job_id):
            if self._namespace:
                found = [self.api.get(pod_path(self._namespace, job_id))]
            else:
                selector = f"{_DRIVERS},{doc.JOB}={job_id}"
                found = list(self.api.items("/api/v1/pods", labelSelector=selector))
        pod = jobs.oldest(found)
        if pod is None:
            raise UnknownJob(f"the cluster has no job {job_id!r}")
        return pod

    def _end_workers_of(self, pod: Json) -> None:
        """Nobody drives the job any more: with its driver's pod its workers go too."""
        try:
            self.api.delete(_path(pod), uid=pod["metadata"]["uid"])
        except KubeError as error:
            logger.warning("Pod %s could not be deleted: %s", pod["metadata"]["name"], error)

    def _unless_never_starts(self, job: ClusterJob, pod: Json) -> ClusterJob:
        """The job, failed for good if its driver's image cannot be had within the time for that; one that
        was asked to stop has then ended, since nobody else will say so.
        """
        born = unix_s(pod["metadata"].get("creationTimestamp"))
        trouble = pod_trouble(pod, self._settings.place_wait_s, self.api.server_unix_s - born)
        if trouble is None or not trouble.fatal:
            return job
        if job.status.stop is not None:
            return replace(job, status=replace(job.status, phase="ended", held={}))
        message = f"the driver cannot start: {trouble.reason}"
        return replace(job, status=replace(job.status, phase="failed", final=True, message=message))

    def _quotas(self) -> list[dict[str, Any]]:
        try:
            return list(self.api.items("/api/v1/resourcequotas"))
        except KubeError as error:
            if error.status != 403:
                raise
            logger.warning("Quotas cannot be read, so they are not respected beforehand: %s", error)
            return []

    def _mend_allocations(self, number: int) -> None:
        """Under the lease: where an allocation cannot be read, or has a number that nobody gave out, the job
        is given by this decision what its driver has. That it cannot be done costs that job alone.
        """
        if self._view is None or not self._leased:
            return
        view = self._view[0]
        types = {node.name: node.gpu_type for node in view.nodes}
        for job in view.jobs:
            job_id, pod = job.job_id, self._drivers[job.job_id]
            if not (fault := jobs.allocation_fault(pod, given_out=number)):
                continue
            placement = jobs.state_of(pod).placement or job.status.held
            allocation = Allocation(
                decision=number,
                placement=placement,
                gpu_type=next((types[name] for name in placement if name in types), ""),
                reason="its allocation was not to be read; it keeps what it has",
            )
            texts = {doc.DECISION: str(number), doc.ALLOCATION: encode(allocation)}
            meta = {"resourceVersion": pod["metadata"]["resourceVersion"], "annotations": texts}
            try:
                mended = self.api.patch(_path(pod), {"metadata": meta})
            except KubeError as error:
                logger.error("Job %s: %s; that could not be mended: %s", job_id, fault, error)
                continue
            logger.error("Job %s: %s; mended, it keeps what it has", job_id, fault)
            self._remember(job_id, mended, allocation)

    def _tell_lost(self) -> None:
        """Under the lease: drivers hear of the nodes of their workers that count as lost by now.

        At their last decision such a node may have been silent for a moment only; and one that is back is
        none any more. A failure costs that job alone.
        """
        if self._view is None or not self._leased:
            return
        for job in self._view[0].jobs:
            pod = self._drivers[job.job_id]
            told: frozenset[str] = or_else(notes.lost_of, doc.annotations(pod), frozenset())
            lost = {key.partition(":")[0] for key in job.status.held} & self._lost
            lost |= told & self._lost
            if lost == told:
                continue
            meta = {"annotations": {doc.LOST: json.dumps(sorted(lost))}}
            try:
                self.api.patch(_path(pod), {"metadata": meta})
            except KubeError as error:
                logger.error("Job %s does not hear of lost nodes: %s", job.job_id, error)

    def _last_decision(self) -> int:
        """The last number given out; our own one for some seconds while nobody else may schedule."""
        with self._asking:
            if self._leased and self._given_out and time.monotonic() < self._given_out[1] + _SEEN_AGAIN_S:
                return self._given_out[0]
            with translated("decision number"):
                number = self._lease.last_decision()
            self._given_out = (number, time.monotonic())
            return number

    def _check_placement(self, placement: Placement) -> None:
        """Against the view that the caller planned with, under the lease: what a pod of somebody else takes
        meanwhile, the driver finds out.
        """
        if not placement:
            return
        view = self._view[0] if self._view is not None and self._leased else self.observe()
        sizes = {node.name: node.gpus for node in view.nodes}
        for name, gpus in placement.items():
            if gpus > sizes.get(name, 0):
                has = f"has {sizes[name]} to give" if name in sizes else "is none that gives any"
                raise Refused(f"placement: {gpus} GPUs on {name!r}, which {has}")

    def _patch(self, pod: Json, job_id: str, expected: int, allocation: Allocation) -> Json:
        lost = sorted(self._lost) if self._leased else []
        changes: list[tuple[str, str]] = [
            (doc.DECISION, str(allocation.decision)),
            (doc.ALLOCATION, encode(allocation)),
            (doc.LOST, json.dumps(lost)),
        ]
        patch = [{"op": "test", "path": _at(doc.DECISION), "value": str(expected)}]
        patch += [{"op": "add", "path": _at(name), "value": value} for name, value in changes]
        try:
            with translated(f"patch {job_id}", job_id=job_id, writes=True):
                return self.api.patch(_path(pod), patch)
        except Refused:
            now = _stored(self._driver(job_id))
            if now == expected:
                raise
            raise Conflict(f"{job_id}: decision {now} is stored, not {expected}; observe again") from None

    def _change(self, pod: Json, job_id: str, name: str, new: str) -> Json:
        """Set one annotation if it still is as in ``pod``; raises Conflict otherwise."""
        old = doc.annotations(pod).get(name)
        unchanged = (
            {"path": _at(name), "value": old}
            if old is not None
            else {"path": "/metadata/resourceVersion", "value": pod["metadata"]["resourceVersion"]}
        )
        patch = [{"op": "test", **unchanged}, {"op": "add", "path": _at(name), "value": new}]
        try:
            with translated(f"{name} of {job_id}", job_id=job_id, writes=True):
                return self.api.patch(_path(pod), patch)
        except Refused:
            now = doc.annotations(self._driver(job_id)).get(name)
            if now == old is not None:
                raise
            raise Conflict(f"{job_id}: {name} is {now!r} by now, not {old!r}") from None

    def _remember(self, job_id: str, pod: Json, allocation: Allocation) -> None:
        """Apply our own patch to the view that is still in use."""
        with self._changing:
            if self._view is None or not self._leased:
                return
            view, until_s = self._view
            self._drivers[job_id] = pod
            changed = tuple(
                replace(job, allocation=allocation) if job.job_id == job_id else job for job in view.jobs
            )
            self._view = (ClusterView(nodes=view.nodes, jobs=changed), until_s)


def _path(pod: Json) -> str:
    return pod_path(pod["metadata"]["namespace"], pod["metadata"]["name"])


def _at(name: str) -> str:
    """JSON pointer of an annotation."""
    return "/metadata/annotations/" + name.replace("~", "~0").replace("/", "~1")


def _stored(pod: Json) -> int | None:
    """The decision number that a patch finds there."""
    return read_decision(doc.annotations(pod).get(doc.DECISION, ""))


def _is_active_driver(pod: Json) -> bool:
    return doc.labels(pod).get(doc.ROLE) == doc.DRIVER_ROLE and not jobs.is_over(pod)


def _holding(job: ClusterJob, held: Placement) -> ClusterJob:
    """With what its worker pods hold, of which its driver may know less."""
    return replace(job, status=replace(job.status, held=held)) if job.status.held != held else job


def _readable(pod: Json, now_unix_s: float) -> ClusterJob:
    """The job; raises DriverLost where it is not to be known which one that is: its task's submission is."""
    try:
        return jobs.job_of(pod, now_unix_s=now_unix_s)
    except DocumentError as error:
        name = pod["metadata"]["name"]
        raise DriverLost(f"the pod of {name} cannot be read: {error}") from None


def _is_lost(pod: Json, now_unix_s: float) -> bool:
    """Whether nobody drives the job any more: its driver ended early, or is long overdue in ending."""
    return jobs.is_abandoned(pod) or is_overdue(pod, now_unix_s)


def _end_of(pod: Json) -> str:
    status = pod.get("status") or {}
    parts = [status.get("phase"), status.get("reason"), status.get("message")]
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended:
            message = (ended.get("message") or "").strip()[-500:]
            parts.append(f"exit code {ended.get('exitCode')} ({ended.get('reason')}) {message}".strip())
    return ", ".join(str(part) for part in parts if part) or "no cause is known"
