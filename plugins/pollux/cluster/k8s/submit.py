"""Submitting a job: at most one driver pod a job, by its name; a job that is opened again gets a new pod."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pollux.cluster.base import JobIdentity
from pollux.cluster.k8s import jobs
from pollux.cluster.k8s.manifest import driver_pod, first_notes
from pollux.cluster.k8s.nodes import unix_s
from pollux.cluster.k8s.settings import KubeSettings
from pollux.errors import ClusterUnavailable, Refused
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path
from pollux_agent.driver.machine import FINAL_PHASES
from pollux_agent.driver.state import DriverState
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import JobSpec

Json = Mapping[str, Any]

_JOB_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
_POLL_S = 0.5
_OVERDUE_S = 30.0
_EXTRA_WAIT_S = 60.0
_CLOCKS_AGREE_S = 3.0


@dataclass(slots=True)
class Submitter:
    """Makes driver pods from ``user_pod`` in ``namespace``; raises KubeError besides what it names."""

    api: KubeApi
    settings: KubeSettings
    namespace: str | None
    user_pod: Callable[[], Json] | None
    mlflow_tracking_uri: str

    def submit(
        self, job_id: str, *, identity: JobIdentity, spec: JobSpec, run_id: str | None, fresh: bool
    ) -> Json:
        """The job's driver pod: the one there is if it may stay, else a new one.

        Raises Refused, and ClusterUnavailable where the pod before does not go away.
        """
        if _JOB_ID.fullmatch(job_id) is None:
            raise Refused(f"job_id: {job_id[:80]!r} is no DNS label of 52 characters at most")
        old = self._find(job_id)
        if old is not None:
            self._check_owner(job_id, old, identity)
            if _stays(old, spec, fresh=fresh, now_unix_s=self.api.server_unix_s):
                return old
            old = self._ended(job_id, old)
        notes = self._notes(old, identity=identity, spec=spec, run_id=run_id, fresh=fresh)
        body = driver_pod(
            self.user_pod() if self.user_pod else {},
            job_id=job_id,
            namespace=self._where,
            notes=notes,
            deployment=identity.deployment,
            settings=self.settings,
        )
        if old is not None:
            self._remove(job_id, old)
        try:
            return self.api.create(pod_path(self._where), body)
        except KubeError as error:
            if error.status != 409:
                raise
            there: Json = self.api.get(pod_path(self._where, job_id))
            self._check_owner(job_id, there, identity)
            return there

    @property
    def _where(self) -> str:
        return self.namespace or self.settings.namespace

    def _find(self, job_id: str) -> Json | None:
        try:
            return self.api.get(pod_path(self._where, job_id))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def _check_owner(self, job_id: str, pod: Json, identity: JobIdentity) -> None:
        try:
            owner = jobs.job_of(pod, now_unix_s=0.0).identity
        except DocumentError:
            raise Refused(f"job_id: a pod {job_id!r} is there that is no job's driver; remove it") from None
        if owner != identity:
            raise Refused(f"job_id: {job_id!r} belongs to another task, {owner}; use another")

    def _ended(self, job_id: str, pod: Json) -> Json:
        """A job that was asked to stop, once its driver has brought it to its end."""
        until_s = time.monotonic() + self.settings.grace_s + _EXTRA_WAIT_S
        while _at_work(pod, self.api.server_unix_s) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
            found = self._find(job_id)
            if found is None:
                return pod
            pod = found
        return pod

    def _remove(self, job_id: str, pod: Json) -> None:
        """Delete the pod and wait until its name is free; by force if its node does not answer any more."""
        uid = pod["metadata"]["uid"]
        until_s = time.monotonic() + self.settings.grace_s + _EXTRA_WAIT_S
        forced = False
        self.api.delete(pod_path(self._where, job_id), uid=uid)
        while (found := self._find(job_id)) is not None and found["metadata"]["uid"] == uid:
            if not forced and is_overdue(found, self.api.server_unix_s):
                forced = True
                self.api.delete(pod_path(self._where, job_id), uid=uid, grace_s=0)
            if time.monotonic() > until_s:
                raise ClusterUnavailable(f"the driver pod {job_id} is being deleted for too long; look at it")
            time.sleep(_POLL_S)

    def _notes(
        self, old: Json | None, *, identity: JobIdentity, spec: JobSpec, run_id: str | None, fresh: bool
    ) -> dict[str, str]:
        """What the new pod starts with; a job that is opened again keeps its age, run, numbers and state."""
        common: dict[str, Any] = {
            "identity": identity,
            "spec": spec,
            "fresh": fresh,
            "settings": self.settings,
            "mlflow_tracking_uri": self.mlflow_tracking_uri,
        }
        if old is None:
            return first_notes(
                **common,
                run_id=run_id,
                submitted_unix_s=_precise(self.api.server_unix_s),
                decision=0,
                try_number=1,
                state=None,
            )
        before = jobs.job_of(old, now_unix_s=self.api.server_unix_s)
        lost = before.status.phase not in FINAL_PHASES and before.status.stop is None
        return first_notes(
            **common,
            run_id=run_id or before.mlflow_run_id,
            submitted_unix_s=before.submitted_unix_s,
            decision=before.allocation.decision,
            try_number=before.status.try_number + (0 if lost else 1),
            state=_opened_again(jobs.state_of(old)),
        )


def _precise(server_unix_s: float) -> float:
    """The time to fractions of a second by our own clock, or the server's where that is known and differs."""
    now_unix_s = time.time()
    differs = server_unix_s > 0 and abs(now_unix_s - server_unix_s) >= _CLOCKS_AGREE_S
    return server_unix_s if differs else now_unix_s


def is_overdue(pod: Json, now_unix_s: float) -> bool:
    """Whether a pod that is being deleted should have been gone for long, as on a node that is lost."""
    due_unix_s = unix_s(pod["metadata"].get("deletionTimestamp"))
    return bool(due_unix_s) and now_unix_s > due_unix_s + _OVERDUE_S


def _opened_again(state: DriverState) -> DriverState:
    if state.phase in FINAL_PHASES:
        state = replace(state, phase="waiting", message="submitted again; waits for GPUs")
    return replace(state, outcome=None, final=False, fruitless_starts=0, retry_unix_s=0.0)


def _stays(pod: Json, spec: JobSpec, *, fresh: bool, now_unix_s: float) -> bool:
    """Whether a submission finds the job as it is: it is driven, or done and asked for nothing more."""
    state = jobs.state_of(pod)
    if state.phase in FINAL_PHASES:
        asks_more = spec.extends(jobs.job_of(pod, now_unix_s=now_unix_s).spec)
        return state.phase == "done" and not fresh and not asks_more
    return _at_work(pod, now_unix_s) and not doc.annotations(pod).get(doc.STOP)


def _at_work(pod: Json, now_unix_s: float) -> bool:
    """Whether a driver is, or will be, at work on the job."""
    if doc.is_terminal(pod) or jobs.is_over(pod):
        return False
    return not pod["metadata"].get("deletionTimestamp")


__all__ = ["Submitter", "is_overdue"]
