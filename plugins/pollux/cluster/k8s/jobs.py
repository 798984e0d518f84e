"""A driver pod's annotations as the documents of the cluster protocol, and back."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pollux.cluster.base import FINAL_PHASES, ClusterJob, JobIdentity, JobStatus, StopReason
from pollux.cluster.driven import as_driven
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.documents import FINISH, annotations, is_terminal, labels
from pollux_agent.driver.state import DriverState
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, JobSpec, Placement, decode

logger = logging.getLogger(__name__)

Json = Mapping[str, Any]

_STOPS: Mapping[str, StopReason] = {
    "failed": "failed",
    "success": "success",
    "clear": "clear",
    "orphan": "orphan",
}

_DELETE, _DELETE_IF_DONE = "delete_pod", "delete_succeeded_pod"
"""Values of the label ``finish`` with which a pod does not stay."""


def job_of(pod: Json, *, now_unix_s: float, held: Placement | None = None) -> ClusterJob:
    """The job of a driver pod; ``held`` are its workers' GPUs, by default as its driver tells.

    Raises DocumentError for annotations that are none of ours.
    """
    notes = annotations(pod)
    try:
        identity = decode(JobIdentity, notes[doc.IDENTITY])
        spec = decode(JobSpec, notes[doc.SPEC])
        allocation = decode(Allocation, notes[doc.ALLOCATION])
        submitted = float(notes[doc.SUBMITTED])
        try_number = int(notes[doc.TRY])
    except (KeyError, ValueError) as error:
        if isinstance(error, DocumentError):
            raise
        raise DocumentError(f"pod {pod['metadata']['name']}: {error!r} among its annotations") from None
    state = state_of(pod)
    stop = _STOPS.get(notes.get(doc.STOP, ""))
    status = replace(
        as_driven(JobStatus(), state, held=state.placement if held is None else held),
        since_unix_s=state.since_unix_s or submitted,
        message=state.message or _startup(pod),
        attained_gpu_s=state.attained(now_unix_s),
        stop=stop,
        try_number=try_number,
    )
    if status.phase in FINAL_PHASES:
        allocation = Allocation(decision=allocation.decision, placement={})
    return ClusterJob(
        job_id=labels(pod)[doc.JOB],
        identity=identity,
        spec=spec,
        submitted_unix_s=submitted,
        mlflow_run_id=notes.get(doc.RUN) or None,
        allocation=allocation,
        status=status,
    )


def state_of(pod: Json) -> DriverState:
    """The driver's state; before it has told any, and if it cannot be read, that of a job that waits."""
    text = annotations(pod).get(doc.STATE)
    try:
        return decode(DriverState, text) if text else DriverState()
    except DocumentError as error:
        logger.warning("The state of %s cannot be read: %s", pod["metadata"]["name"], error)
        return DriverState()


def is_over(pod: Json) -> bool:
    """Whether the job came to its end."""
    return state_of(pod).phase in FINAL_PHASES


def is_abandoned(pod: Json) -> bool:
    """Whether the driver ended before its job did."""
    return is_terminal(pod) and not is_over(pod)


def left_by(pod: Json, now_unix_s: float) -> ClusterJob | None:
    """The job of a driver pod that does not run, if it is over and the pod was not to stay.

    A job that was stopped before its driver ran, or after that was lost, is over too.
    """
    finish = labels(pod).get(FINISH)
    if finish not in (_DELETE, _DELETE_IF_DONE) or pod["metadata"].get("deletionTimestamp"):
        return None
    try:
        job = job_of(pod, now_unix_s=now_unix_s)
    except DocumentError:
        return None
    if job.status.stop is not None and job.status.phase not in FINAL_PHASES:
        job = replace(job, status=replace(job.status, phase="ended", held={}))
    phase = job.status.phase
    goes = phase == "done" if finish == _DELETE_IF_DONE else phase in FINAL_PHASES
    return job if goes else None


def _startup(pod: Json) -> str:
    """What keeps a driver pod from starting, for people."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting.get("message"):
            return f"its driver cannot start: {waiting.get('reason')}: {waiting['message']}"
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"its driver finds no node: {condition.get('message')}"
    return "waits for GPUs"
