"""A job's figures, recomputed from what a run left behind; the demo prints these and none of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

from pollux.verify.record import JobRecord, RunRecord
from pollux.verify.timeline import changes, levels, restart_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """One job of a finished run. Times in seconds; ``allocations`` are (seconds since the first job's
    submission, GPUs); ``state`` is Airflow's word, or the cluster's phase where Airflow was not asked."""

    job_id: str
    name: str
    state: str
    submitted_s: float
    jct_s: float
    resizes: int
    moves: int
    restart_s: float
    mlflow_run_id: str | None
    allocations: tuple[tuple[float, int], ...]


def figures_of(record: RunRecord) -> tuple[JobFigures, ...]:
    """The figures of every job, in order of submission."""
    origin = min((_times(job, record)[0] for job in record.jobs), default=0.0)
    return tuple(_figures(job, record, origin) for job in record.jobs)


def task_states(record: RunRecord) -> Mapping[str, str]:
    """job id -> the last state of its task in Airflow, for the jobs that the export knows."""
    if record.export is None:
        return {}
    tasks = {
        (task.dag_id, task.dag_run_id, task.task_id, task.map_index): task.state or "none"
        for task in record.export.task_instances
    }
    found = {}
    for job in record.jobs:
        of = job.job.identity
        state = tasks.get((of.dag_id, of.run_id, of.task_id, of.map_index))
        if state is not None:
            found[job.job.job_id] = state
    return found


def _figures(job: JobRecord, record: RunRecord, origin: float) -> JobFigures:
    submitted, ended = _times(job, record)
    changed = changes(job)
    return JobFigures(
        job_id=job.job.job_id,
        name=job.name,
        state=task_states(record).get(job.job.job_id, job.job.status.phase),
        submitted_s=submitted - origin,
        jct_s=ended - submitted,
        resizes=sum(change.is_resize for change in changed),
        moves=sum(not change.is_resize for change in changed),
        restart_s=restart_seconds(job),
        mlflow_run_id=job.job.mlflow_run_id,
        allocations=tuple((max(0.0, t - origin), gpus) for t, gpus in levels(job)),
    )


def _times(job: JobRecord, record: RunRecord) -> tuple[float, float]:
    """Submission and end, as the person who triggered the run sees them; unix seconds."""
    submitted = job.job.submitted_unix_s
    ended = max((submitted, *(event.t_unix_s for event in job.driver if event.event == "end")))
    for run in record.export.dag_runs if record.export else ():
        if (run.dag_id, run.dag_run_id) == (job.job.identity.dag_id, job.job.identity.run_id):
            if run.queued_at:
                submitted = run.queued_at.timestamp()
            if run.end_date:
                ended = run.end_date.timestamp()
    return submitted, ended
