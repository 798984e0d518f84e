"""What a job's end means for its Airflow task: a pure function, so that every case is a row in a test."""

from dataclasses import dataclass
from typing import Literal

from pollux.cluster.base import ClusterJob

VerdictKind = Literal["success", "fail", "retry", "skip", "resubmit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """fail: at once, a retry cannot help; retry: costs one; resubmit: within this try; skip: ended early."""

    kind: VerdictKind
    message: str = ""


def judge(job: ClusterJob) -> Verdict:
    """The verdict on a final job.

    A clear is meant for the try before the one that sees it (Airflow may start that before it tells the
    trigger), so this one submits the job again.
    """
    status = job.status
    outcome = status.outcome
    if status.phase == "done":
        if outcome is not None and outcome.kind == "done":
            return Verdict(kind="success")
        return Verdict(kind="retry", message=f"{job.job_id} ended without its completion marker")
    if status.phase == "failed":
        cause = (outcome.error if outcome else "") or status.message or "no cause is known"
        return Verdict(kind="fail" if status.final else "retry", message=f"{job.job_id} failed: {cause}")
    if status.stop == "clear":
        return Verdict(kind="resubmit", message=f"{job.job_id} ended for a new try")
    if status.stop == "success":
        return Verdict(kind="skip", message=f"{job.job_id} was ended by a person before it was done")
    if status.stop == "failed":
        return Verdict(kind="fail", message=f"{job.job_id} was stopped by a person")
    return Verdict(kind="retry", message=f"{job.job_id} was ended: {status.message or 'taken for an orphan'}")
