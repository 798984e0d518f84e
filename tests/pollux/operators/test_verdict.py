"""Every way a job can end, and what it means for its task."""

from dataclasses import dataclass, replace

import pytest

from pollux.cluster.base import ClusterJob, JobIdentity, JobStatus
from pollux.operators.verdict import VerdictKind, judge
from pollux_agent.protocol import JobSpec, Outcome

JOB = ClusterJob(
    job_id="digits-0123456789",
    identity=JobIdentity(deployment="airflow", dag_id="d", run_id="r", task_id="t"),
    spec=JobSpec(name="digits", script="a.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=2),
    submitted_unix_s=0.0,
)


def outcome(kind: str, error: str = "") -> Outcome:
    return Outcome(kind=kind, job_id=JOB.job_id, incarnation=1, rank=0, time_unix_s=1.0, error=error)


@dataclass(frozen=True)
class Case:
    id: str
    status: JobStatus
    want: VerdictKind


CASES = [
    Case("done with the marker succeeds", JobStatus(phase="done", outcome=outcome("done")), "success"),
    Case("done without a marker never succeeds", JobStatus(phase="done"), "retry"),
    Case(
        "done with another outcome never succeeds",
        JobStatus(phase="done", outcome=outcome("interrupted")),
        "retry",
    ),
    Case(
        "a failure in mid-training costs a retry",
        JobStatus(phase="failed", outcome=outcome("failed", "ValueError: x")),
        "retry",
    ),
    Case(
        "a failure that a retry cannot help fails at once",
        JobStatus(phase="failed", final=True, outcome=outcome("failed", "ValueError: x")),
        "fail",
    ),
    Case("a final failure without outcome fails at once", JobStatus(phase="failed", final=True), "fail"),
    Case("stopped as failed by a person fails", JobStatus(phase="ended", stop="failed"), "fail"),
    Case("ended early as success is skipped", JobStatus(phase="ended", stop="success"), "skip"),
    Case("a clear is meant for the try before", JobStatus(phase="ended", stop="clear"), "resubmit"),
    Case(
        "taken for an orphan while its task lives: a retry", JobStatus(phase="ended", stop="orphan"), "retry"
    ),
    Case(
        "done counts even if it was asked to stop",
        JobStatus(phase="done", stop="failed", outcome=outcome("done")),
        "success",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_verdict(case: Case) -> None:
    verdict = judge(replace(JOB, status=case.status))
    assert verdict.kind == case.want
    if case.want != "success":
        assert JOB.job_id in verdict.message


def test_a_failures_message_names_the_scripts_error() -> None:
    status = JobStatus(phase="failed", outcome=outcome("failed", "ValueError: no such column"))
    assert "ValueError: no such column" in judge(replace(JOB, status=status)).message
