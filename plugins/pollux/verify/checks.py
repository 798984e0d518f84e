"""The list of checks: each has a name, a verdict and an explanation that a person can act on."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pollux.errors import StoreError
from pollux.verify.decisions import Decide, altered, is_by_policy, outside_schedule, undecided
from pollux.verify.figures import task_states
from pollux.verify.record import EXPECTATIONS_FILE, EXPORT_FILE, JobRecord, RunRecord
from pollux.verify.runs import REQUIRED_METRICS, Run, read_runs
from pollux.verify.timeline import changes
from pollux.verify.training import given_twice, lost_events, lost_training

DATABASE = Path("mlflow") / "mlflow.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was checked. ``explanation`` says what was found, also when all is well."""

    name: str
    ok: bool
    explanation: str


def run_checks(record: RunRecord, decide: Decide) -> tuple[Check, ...]:
    """Every check, in the order of a run's life; ``decide`` is the policy that replays the snapshots."""
    return tuple(_checks(record, decide))


def _checks(record: RunRecord, decide: Decide) -> Iterator[Check]:
    jobs = record.jobs
    slots = {(worker.node, slot) for job in jobs for worker in job.workers for slot in worker.slots}
    starts = sum(len(job.incarnations()) for job in jobs)
    tolerated = "; ".join(["all files could be read", *record.remarks])
    yield _check("files", record.problems, tolerated)
    yield _check("jobs", _missing_jobs(record), f"{len(jobs)} jobs ran")
    yield _check("slots", given_twice(record), f"{len(slots)} slots, none given twice at any time")
    yield _check(
        "steps",
        [breach for job in jobs for breach in lost_training(job)],
        f"over {starts} starts training always went on from the last checkpoint",
    )
    yield _check(
        "replay",
        altered(record.decisions, decide),
        f"{len(record.decisions)} saved snapshots give the saved decisions again",
    )
    yield _check(
        "placements",
        [breach for job in jobs for breach in undecided(job, record.decisions)],
        f"all {starts} starts ran where a decision put them",
    )
    yield _resizes(record)
    yield from _airflow(record)
    yield from _mlflow(record)
    yield _check(
        "completion",
        [f"{job.job.job_id}: {what}" for job in jobs if (what := _unfinished(job))],
        f"all {len(jobs)} jobs left the agent's completion marker",
    )


def _unfinished(job: JobRecord) -> str:
    if job.completion is None:
        return "no completion marker"
    if (job.completion.kind, job.completion.job_id) != ("done", job.job.job_id):
        return f"its marker says {job.completion.kind} of job {job.completion.job_id}"
    return ""


def _missing_jobs(record: RunRecord) -> list[str]:
    if not record.jobs:
        return ["no job ran in this folder"]
    ran = {job.job.identity.run_id for job in record.jobs}
    wanted = record.expectations.jobs if record.expectations else ()
    missing = [f"{job.name} (run {job.dag_run_id}) never reached the cluster" for job in wanted]
    breaches = [text for job, text in zip(wanted, missing, strict=True) if job.dag_run_id not in ran]
    for job in record.jobs:
        breaches += lost_events(job) if job.workers else [f"{job.job.job_id}: its workers left no events"]
    return breaches


def _resizes(record: RunRecord) -> Check:
    resized = [change for job in record.jobs for change in changes(job) if change.is_resize]
    decided = [change for change in resized if is_by_policy(change, record.decisions)]
    breaches = [f"no decision asked for {change}" for change in resized if change not in decided]
    if len(record.jobs) > 1 and not any(change.gpus_after < change.gpus_before for change in decided):
        breaches.append("the policy never shrank a job")
    if not any(change.gpus_after > change.gpus_before for change in decided):
        breaches.append("the policy never grew a job")
    return _check("resizes", breaches, "; ".join(map(str, decided)))


def _airflow(record: RunRecord) -> Iterator[Check]:
    if record.export is None:
        yield Check(name="tasks", ok=False, explanation=f"{EXPORT_FILE} is missing or cannot be read")
        return
    states = task_states(record)
    yield _check(
        "tasks",
        [
            f"{job.job.job_id}: its task is {states.get(job.job.job_id, 'not in the export')}"
            for job in record.jobs
            if states.get(job.job.job_id) != "success"
        ],
        f"all {len(states)} tasks succeeded in Airflow",
    )
    yield _check(
        "schedule",
        outside_schedule(record.decisions, record.export),
        f"all {len(record.decisions)} decisions were made inside runs of {record.export.schedule_dag_id}",
        prefix="outside every run of the scheduling DAG: ",
    )


def _mlflow(record: RunRecord) -> Iterator[Check]:
    try:
        runs = read_runs(record.root / DATABASE)
    except StoreError as error:
        yield Check(name="runs", ok=False, explanation=str(error))
        return
    of_job = {job.job.job_id: [run for run in runs if run.job_id == job.job.job_id] for job in record.jobs}
    yield _check("runs", _bad_runs(record, of_job), f"one finished run for each of {len(record.jobs)} jobs")
    yield _check(
        "metrics",
        [
            f"{job_id}: run {run.run_id} lacks {', '.join(lacking)}"
            for job_id, found in of_job.items()
            for run in found
            if (lacking := [k for k in REQUIRED_METRICS if not math.isfinite(run.metrics.get(k, math.nan))])
        ],
        f"every run has {', '.join(REQUIRED_METRICS)}",
    )
    yield _check("target", *_targets(record, of_job))


def _bad_runs(record: RunRecord, of_job: dict[str, list[Run]]) -> Iterator[str]:
    for job in record.jobs:
        job_id, found = job.job.job_id, of_job[job.job.job_id]
        if len(found) != 1:
            yield f"{job_id}: {len(found)} runs instead of one"
        elif found[0].status != "FINISHED":
            yield f"{job_id}: run {found[0].run_id} is {found[0].status}, not FINISHED"
        elif found[0].run_id != job.job.mlflow_run_id:
            yield f"{job_id}: the cluster names run {job.job.mlflow_run_id}, MLflow has {found[0].run_id}"


def _targets(record: RunRecord, of_job: dict[str, list[Run]]) -> tuple[list[str], str]:
    if record.expectations is None:
        return [], f"nothing to reach: there is no {EXPECTATIONS_FILE}"
    breaches: list[str] = []
    reached: list[str] = []
    for job in record.jobs:
        for wanted in record.expectations.jobs:
            if wanted.dag_run_id != job.job.identity.run_id:
                continue
            for run in of_job[job.job.job_id]:
                value = run.metrics.get(wanted.metric, math.nan)
                good = value >= wanted.target if wanted.higher_is_better else value <= wanted.target
                sign = ">=" if wanted.higher_is_better else "<="
                words = f"{job.name}: {wanted.metric} {value:.4g} (target {sign} {wanted.target:g})"
                (reached if good else breaches).append(words)
    return breaches, "; ".join(reached)


def _check(name: str, breaches: Iterable[str], well: str, *, prefix: str = "") -> Check:
    found: Sequence[str] = list(breaches)
    if not found:
        return Check(name=name, ok=True, explanation=well)
    shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    return Check(name=name, ok=False, explanation=prefix + _printable(shown))


def _printable(text: str) -> str:
    """Files of jobs are not trusted: what they say must not move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
