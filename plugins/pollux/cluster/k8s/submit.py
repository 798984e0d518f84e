"""Submitting a job: at most one driver pod a job, by its name; a job that is opened again gets a new pod."""

import logging
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
from pollux_agent.driver.kube import notes
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path
from pollux_agent.driver.kube.notes import or_else
from pollux_agent.driver.machine import FINAL_PHASES
from pollux_agent.driver.state import DriverState
from pollux_agent.protocol import JobSpec, encode

Json = Mapping[str, Any]

logger = logging.getLogger(__name__)

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
            old = self._mended(old, identity, spec)
            if _stays(old, spec, fresh=fresh, now_unix_s=self.api.server_unix_s):
                return old
            old = self._ended(job_id, old)
        first = self._notes(old, identity=identity, spec=spec, run_id=run_id, fresh=fresh)
        body = driver_pod(
            self.user_pod() if self.user_pod else {},
            job_id=job_id,
            namespace=self._where,
            notes=first,
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
        """A driver's pod whose identity cannot be read is its job's by its name."""
        owner = or_else(notes.identity_of, doc.annotations(pod), None)
        if owner is None and not _is_marked(pod):
            raise Refused(f"job_id: a pod {job_id!r} is there that is no job's driver; remove it")
        if owner not in (None, identity):
            raise Refused(f"job_id: {job_id!r} belongs to another task, {owner}; use another")

    def _mended(self, pod: Json, identity: JobIdentity, spec: JobSpec) -> Json:
        """With what cannot be read of a job at work, and what its submission knows, put right."""
        if not _at_work(pod, self.api.server_unix_s):
            return pod
        known = {doc.IDENTITY: encode(identity), doc.SPEC: encode(spec)}
        found = doc.annotations(pod)
        faults = {name: fault for name in known if (fault := notes.fault_of(found, name))}
        labels = notes.driver_labels(pod["metadata"]["name"], identity.deployment)
        if not faults and labels.items() <= doc.labels(pod).items():
            return pod
        logger.warning(
            "What cannot be read of the driver's pod is put right: %s",
            "; ".join(faults.values()) or "its labels",
        )
        changes = {"annotations": {name: known[name] for name in faults}, "labels": labels}
        path = pod_path(self._where, pod["metadata"]["name"])
        return self.api.patch(path, {"metadata": {**changes, "uid": pod["metadata"]["uid"]}})

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
        found, state = doc.annotations(old), jobs.state_of(old)
        lost = state.phase not in FINAL_PHASES and or_else(notes.stop_of, found, None) is None
        return first_notes(
            **common,
            run_id=run_id or or_else(notes.run_of, found, ""),
            submitted_unix_s=jobs.submitted(old),
            decision=jobs.allocation_of(old).decision,
            try_number=or_else(notes.try_of, found, 1) + (0 if lost else 1),
            state=_opened_again(state),
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
        done = or_else(notes.spec_of, doc.annotations(pod), None)
        asks_more = done is None or spec.extends(done)
        return state.phase == "done" and not fresh and not asks_more
    return _at_work(pod, now_unix_s) and or_else(notes.stop_of, doc.annotations(pod), None) is None


def _is_marked(pod: Json) -> bool:
    """Whether any label or annotation of ours is left on it."""
    return any(name.startswith(doc.PREFIX) for name in [*doc.labels(pod), *doc.annotations(pod)])


def _at_work(pod: Json, now_unix_s: float) -> bool:
    """Whether a driver is, or will be, at work on the job."""
    if doc.is_terminal(pod) or jobs.is_over(pod):
        return False
    return not pod["metadata"].get("deletionTimestamp")


__all__ = ["Submitter", "is_overdue"]
