"""What the cycle and the operator need of a cluster, whichever kind it is."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Annotated, Literal, Protocol

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.snapshot import Node
from pollux_agent.protocol import (
    DOCUMENT_CONFIG,
    Allocation,
    DecisionNumber,
    JobSpec,
    Outcome,
    Placement,
)
from pollux_agent.protocol import JobIdentity as JobIdentity

Phase = Literal["waiting", "starting", "running", "stopping", "done", "failed", "ended"]
"""waiting: holds nothing; ended: stopped by a person; done, failed and ended are final."""

StopReason = Literal["failed", "success", "clear", "orphan"]
Count = Annotated[int, Field(ge=0, le=2**53, strict=True)]

MAX_LEASE = timedelta(hours=1)
"""No cluster gives its lease for longer, so that a dead scheduler does not keep others out for ever."""

FINAL_PHASES: frozenset[Phase] = frozenset({"done", "failed", "ended"})


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class JobStatus:
    """What became of a job so far, as its driver knows it.

    ``held`` are the GPUs its workers occupy at this moment, also while they stop. ``outcome`` is how the
    job ended, and ``final`` that a retry cannot help. ``try_number`` counts submissions, ``restarts`` the
    starts after the first.
    """

    phase: Phase = "waiting"
    incarnation: Count = 0
    held: Placement = Field(default_factory=dict)
    acted_decision: DecisionNumber = 0
    since_unix_s: float = 0.0
    message: str = ""
    outcome: Outcome | None = None
    final: bool = False
    restarts: Count = 0
    max_gpus_seen: Count = 0
    attained_gpu_s: float = 0.0
    stop: StopReason | None = None
    try_number: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class ClusterJob:
    """A job as the cluster stores it: the documents that Kubernetes keeps as a pod's annotations."""

    job_id: str
    identity: JobIdentity
    spec: JobSpec
    submitted_unix_s: float
    mlflow_run_id: str | None = None
    allocation: Allocation = Field(default_factory=lambda: Allocation(decision=0))
    status: JobStatus = Field(default_factory=JobStatus)


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class ClusterView:
    """Nodes and jobs at one moment. ``jobs`` holds every job that is not final, in order of submission."""

    nodes: tuple[Node, ...]
    jobs: tuple[ClusterJob, ...]


class Cluster(Protocol):
    """What one scheduling cycle needs of a cluster.

    Every method raises ClusterUnavailable when the cluster does not answer. ``patch_allocation`` may be
    called from so many threads as ``patches_at_once`` says, for different jobs.
    """

    @property
    def patches_at_once(self) -> int: ...

    def lease(self, holder: str, ttl: timedelta) -> AbstractContextManager[None]:
        """Hold the cluster's one scheduling lease for a cycle; raises Conflict while another has it."""
        ...

    def next_decision(self, above: int = 0) -> int:
        """A decision number above every number given out before, and above ``above`` and any found on a job
        as far as one can have been given out: see :mod:`pollux.cluster.numbers`.
        """
        ...

    def observe(self) -> ClusterView:
        """Nodes, and all jobs that are not final."""
        ...

    def patch_allocation(self, job_id: str, *, expected: int, allocation: Allocation) -> None:
        """Set the job's allocation if the one stored has decision number ``expected``.

        Raises Conflict if it has another number or if the allocation's own decision number is below the
        last one given out, UnknownJob, or Refused (a final job, unknown GPUs).
        """
        ...

    def set_run(self, job_id: str, run_id: str) -> None:
        """Record the job's MLflow run; raises Conflict if another run is recorded already."""
        ...

    def job(self, job_id: str) -> ClusterJob:
        """The job as it is now, final or not; raises UnknownJob."""
        ...

    def held(self) -> Mapping[str, Placement]:
        """GPUs that each job's workers occupy now, jobs without any left out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class LogChunk:
    """What a job's workers printed since a cursor, line by line, and the cursor to ask with next time."""

    lines: tuple[str, ...]
    cursor: str


class JobControl(Protocol):
    """What the operator needs of a cluster. Every method raises ClusterUnavailable if none answers."""

    def submit(
        self, job_id: str, *, identity: JobIdentity, spec: JobSpec, run_id: str | None, fresh: bool = False
    ) -> ClusterJob:
        """Submit a job, or find it again.

        An active job of that id is returned as it is (re-attach); a failed or ended one, or one that was
        asked to stop, waits for GPUs again and resumes from its checkpoint, or from nothing with ``fresh``;
        a done one is returned as it is unless ``fresh``, or asked for more epochs, for which it goes on from
        its last checkpoint (``JobSpec.extends``). A job that is opened again goes on in ``run_id``,
        another run than before only if somebody deleted that one. Raises Refused with the cause, such as a
        script that does not exist.
        """
        ...

    def job(self, job_id: str) -> ClusterJob:
        """The job as it is now; raises UnknownJob."""
        ...

    def stop(self, job_id: str, reason: StopReason) -> ClusterJob:
        """Ask for the job's end; kept with the job, so it is carried out even if the caller goes away.

        failed and orphan stop at once, success and clear after a checkpoint. Raises UnknownJob.
        """
        ...

    def logs(self, job_id: str, cursor: str = "") -> LogChunk:
        """What the workers printed since ``cursor`` (all of it for the empty one); raises UnknownJob."""
        ...
