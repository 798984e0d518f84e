"""Driver pods as the jobs of the cluster protocol. What their annotations say is read in
:mod:`pollux_agent.driver.kube.notes`; here is what counts instead of what cannot be read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pollux.cluster.base import FINAL_PHASES, ClusterJob, JobStatus
from pollux.cluster.driven import as_driven
from pollux.cluster.k8s.nodes import unix_s
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube import notes
from pollux_agent.driver.kube.documents import FINISH, annotations, is_terminal, labels
from pollux_agent.driver.kube.notes import or_else
from pollux_agent.driver.state import DriverState
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, read_decision

Json = Mapping[str, Any]

_DELETE, _DELETE_IF_DONE = "delete_pod", "delete_succeeded_pod"
"""Values of the label ``finish`` with which a pod does not stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Jobs by their id with their pods, oldest first, and why other pods that call themselves drivers are
    none, by namespace and name.
    """

    jobs: Mapping[str, ClusterJob]
    pods: Mapping[str, Json]
    left_out: Mapping[str, str]


def read_jobs(pods: Iterable[Json], *, now_unix_s: float) -> Found:
    """One pod is a job's: where several claim to be, the oldest, so that no later one takes its place."""
    jobs: dict[str, ClusterJob] = {}
    found: dict[str, Json] = {}
    left_out = {}
    for pod in sorted(pods, key=_age):
        meta = pod["metadata"]
        try:
            job = job_of(pod, now_unix_s=now_unix_s)
            if job.job_id in jobs:
                first = found[job.job_id]["metadata"]["namespace"]
                raise DocumentError(f"namespace {first} has an older pod of that name; remove one of them")
        except DocumentError as error:
            left_out[f"{meta['namespace']}/{meta['name']}"] = str(error)
            continue
        jobs[job.job_id], found[job.job_id] = job, pod
    return Found(jobs=jobs, pods=found, left_out=left_out)


def oldest(pods: Iterable[Json]) -> Json | None:
    """Of pods of one job id the one that is the job's."""
    return min((pod for pod in pods if notes.is_driver(pod)), key=_age, default=None)


def job_of(pod: Json, *, now_unix_s: float) -> ClusterJob:
    """The job of a driver pod.

    Raises DocumentError where it is not to be known which job that is, or what it trains. An allocation that
    cannot be read is what the driver has, and anything else as if it had not been told.
    """
    if not notes.is_driver(pod):
        raise DocumentError(f"label {doc.JOB}: not the pod's name; no job has such a driver")
    found = annotations(pod)
    state = state_of(pod)
    submitted_unix_s = submitted(pod)
    allocation = allocation_of(pod)
    if state.phase in FINAL_PHASES:
        allocation = Allocation(decision=allocation.decision)
    return ClusterJob(
        job_id=pod["metadata"]["name"],
        identity=notes.identity_of(found),
        spec=notes.spec_of(found),
        submitted_unix_s=submitted_unix_s,
        mlflow_run_id=or_else(notes.run_of, found, "") or None,
        allocation=allocation,
        status=replace(
            as_driven(JobStatus(), state, held=state.placement),
            since_unix_s=state.since_unix_s or submitted_unix_s,
            message=state.message or _startup(pod),
            attained_gpu_s=state.attained(now_unix_s),
            stop=or_else(notes.stop_of, found, None),
            try_number=or_else(notes.try_of, found, 1),
        ),
    )


def allocation_of(pod: Json) -> Allocation:
    """What the job was given; where that cannot be read, what its driver has."""
    try:
        return notes.allocation_of(annotations(pod))
    except DocumentError:
        state = state_of(pod)
        return Allocation(decision=state.acted_decision, placement=state.placement)


def allocation_fault(pod: Json, *, given_out: int) -> str:
    """What is wrong with the allocation that stands there, empty if nothing is: a number that was not given
    out is wrong too.
    """
    try:
        number = notes.allocation_of(annotations(pod)).decision
    except DocumentError as error:
        return str(error)
    if number > given_out:
        return f"annotation {doc.DECISION}: {number} was never given out, the last one is {given_out}"
    return ""


def numbers_of(pod: Json) -> list[int]:
    """Every decision number that stands on a driver pod, the one that its driver has acted on too."""
    found = annotations(pod)
    stored = read_decision(found.get(doc.DECISION, ""))
    return [stored or 0, allocation_of(pod).decision, state_of(pod).acted_decision]


def submitted(pod: Json) -> float:
    """When the job was, in Unix seconds; where that cannot be read, when the pod was made."""
    made_unix_s = unix_s(pod["metadata"].get("creationTimestamp"))
    return or_else(notes.submitted_of, annotations(pod), made_unix_s)


def state_of(pod: Json) -> DriverState:
    """The driver's state; before it has told any, and if it cannot be read, that of a job that waits."""
    return or_else(notes.state_of, annotations(pod), DriverState())


def is_over(pod: Json) -> bool:
    """Whether the job came to its end."""
    return state_of(pod).phase in FINAL_PHASES


def is_abandoned(pod: Json) -> bool:
    """Whether the driver ended before its job did."""
    return is_terminal(pod) and not is_over(pod)


def left_by(pod: Json, now_unix_s: float) -> ClusterJob | None:
    """The job of a driver pod that does not run, if it is over and the pod was not to stay.

    A job that was stopped before its driver ran, or after that was lost, is over too; and one whose driver
    has ended before it, which goes on only if its task comes back for it.
    """
    finish = labels(pod).get(FINISH)
    if finish not in (_DELETE, _DELETE_IF_DONE) or pod["metadata"].get("deletionTimestamp"):
        return None
    try:
        job = job_of(pod, now_unix_s=now_unix_s)
    except DocumentError:
        return None
    if (job.status.stop is not None or is_abandoned(pod)) and job.status.phase not in FINAL_PHASES:
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


def _age(pod: Json) -> tuple[str, str]:
    meta = pod["metadata"]
    return meta.get("creationTimestamp") or "", meta.get("uid") or ""
