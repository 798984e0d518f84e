"""The demo's jobs on Kubernetes, also those whose pods are gone, and ``job.json`` for the checks."""

from dataclasses import replace
from pathlib import Path

from pollux.cluster.base import FINAL_PHASES, ClusterJob
from pollux.cluster.driven import as_driven
from pollux.demo.site import JobLook
from pollux.errors import UnknownJob
from pollux_agent.driver.state import DriverState
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import decode, encode
from pollux_agent.records import write_atomic


class WatchedJobs:
    """Looks at jobs of ``cluster`` and keeps what it saw last in their folders in ``jobs``.

    Airflow's operator deletes a job's pod with its verdict; what the job came to is then in the file that its
    driver left in the folder.
    """

    def __init__(self, cluster: JobLook, jobs: Path) -> None:
        self._cluster, self._jobs = cluster, jobs
        self._seen: dict[str, ClusterJob] = {}

    def job(self, job_id: str) -> ClusterJob:
        """As it is now, or as it was left; raises UnknownJob before its first pod, ClusterUnavailable."""
        before = self._seen.get(job_id)
        if before is not None and before.status.phase in FINAL_PHASES:
            return before
        try:
            now = self._cluster.job(job_id)
        except UnknownJob:
            if before is None:
                raise
            now = self._as_left(before)
        if now != before:
            write_atomic(self._jobs / job_id / "job.json", encode(now).encode())
            self._seen[job_id] = now
        return now

    def _as_left(self, job: ClusterJob) -> ClusterJob:
        try:
            state = decode(DriverState, (self._jobs / job.job_id / "driver.json").read_bytes())
        except (OSError, DocumentError):
            return job
        return replace(job, status=as_driven(job.status, state, held=state.placement))
