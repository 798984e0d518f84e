"""Each job's MLflow run over one cycle: made while the job waits for it, closed once the job is over."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from pollux.cluster.base import FINAL_PHASES, Cluster, ClusterJob, ClusterView, Phase
from pollux.errors import (
    ClusterUnavailable,
    DriverLost,
    PolluxError,
    Refused,
    StoreError,
    StoreUnavailable,
    UnknownJob,
)
from pollux.observe import is_ours
from pollux.record import reason_in_short
from pollux.settings import Settings
from pollux.store import JobRecord, ModelStore, RunStatus
from pollux_agent.protocol import JobFolder
from pollux_agent.report.unsent import keep_unsent, read_unsent

logger = logging.getLogger(__name__)

_STATUS: Mapping[Phase, RunStatus] = {"done": "FINISHED", "failed": "FAILED", "ended": "KILLED"}


def job_records(
    cluster: Cluster,
    store: ModelStore,
    view: ClusterView,
    reports: Mapping[str, JobRecord],
    settings: Settings,
) -> tuple[Mapping[str, JobRecord], Mapping[str, str]]:
    """The record of each of our jobs that has a run or gets one now; and why others have none.

    ``reports`` are the store's, by a query from shortly before or after ``view``.

    Making runs takes at most a third of the interval, but one is always made, however slow MLflow is; jobs
    beyond that wait for the next cycle. A job whose run cannot be had harms no other. Raises StoreUnavailable
    and ClusterUnavailable.
    """
    until_s: float | None = None
    found: dict[str, JobRecord] = {}
    left_out: dict[str, str] = {}
    for job in view.jobs:
        if not is_ours(job, settings):
            continue
        if job.mlflow_run_id is None:
            now_s = time.monotonic()
            until_s = now_s + settings.interval_s / 3 if until_s is None else until_s
            if now_s > until_s:
                left_out[job.job_id] = "its MLflow run is made in the next cycle"
                continue
        try:
            found[job.job_id] = _record(cluster, store, job, reports.get(job.job_id))
        except (StoreUnavailable, ClusterUnavailable):
            raise
        except PolluxError as error:
            left_out[job.job_id] = f"it has no MLflow run: {reason_in_short(error)}"
    return found, left_out


def seen_records(
    view: ClusterView, reports: Mapping[str, JobRecord], settings: Settings
) -> tuple[Mapping[str, JobRecord], Mapping[str, str]]:
    """As :func:`job_records`, but no run is made or opened again, and so no job is left out."""
    found = {
        job.job_id: reports.get(job.job_id)
        or JobRecord(run_id=job.mlflow_run_id or "", remarks=("not fitted yet: it has no open MLflow run",))
        for job in view.jobs
        if is_ours(job, settings)
    }
    return found, {}


def close_ended_runs(
    cluster: Cluster, store: ModelStore, jobs: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """End the runs whose jobs are over, as the jobs ended; the ids of those jobs, and of jobs with an open
    run that the cluster does not know: they may be on their way there.

    What a job's workers could not send, and left in its folder in ``jobs``, is sent first; where folders are
    on a volume that we do not mount, the job's driver sends it.
    """
    active = {job.job_id for job in cluster.observe().jobs}
    closed: list[str] = []
    unknown: list[str] = []
    for job_id, record in store.reports().items():
        if job_id in active:
            continue
        try:
            job = cluster.job(job_id)
        except (DriverLost, Refused):
            continue
        except UnknownJob:
            unknown.append(job_id)
            continue
        if job.status.phase in FINAL_PHASES and job.mlflow_run_id == record.run_id:
            _send_left(store, record.run_id, JobFolder(jobs / job_id).unsent)
            close_run(store, job)
            closed.append(job_id)
    return tuple(closed), tuple(unknown)


def _send_left(store: ModelStore, run_id: str, unsent: Path) -> None:
    """Figures that MLflow refuses are given up; raises StoreUnavailable, with which they stay."""
    if points := read_unsent(unsent):
        try:
            store.add_figures(run_id, points)
        except StoreUnavailable:
            raise
        except StoreError as error:
            logger.warning("%s is given up: %s", unsent, error)
        keep_unsent(unsent, ())


def close_run(store: ModelStore, job: ClusterJob) -> None:
    """End the run of a job that is over, as the job ended; nothing happens where it has none."""
    if job.mlflow_run_id is None:
        return
    phase = job.status.phase
    how = "ended by user" if job.status.stop in ("success", "failed") else phase
    store.close_run(job.mlflow_run_id, _STATUS[phase], how=how, message=job.status.message)


def _record(cluster: Cluster, store: ModelStore, job: ClusterJob, known: JobRecord | None) -> JobRecord:
    """A closed run is opened again for a job that is to train again, not while its workers end."""
    if job.mlflow_run_id is None:
        run_id = store.ensure_run(job.job_id, job.identity, job.spec, job.submitted_unix_s)
        cluster.set_run(job.job_id, run_id)
    else:
        run_id = job.mlflow_run_id
    if known is not None and known.run_id == run_id:
        return known
    return store.reopen_run(job.job_id, run_id, unless_finished=bool(job.status.held))
