"""The scheduler's side of MLflow: one run per job, read with one paged query, and the decisions' record."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pollux.cluster.base import JobIdentity
from pollux.store.connection import Connection
from pollux.store.decisions import DecisionRuns
from pollux.store.reading import JobRecord, is_newer, read_report
from pollux.store.runs import (
    DEPLOYMENT_TAG,
    DROPPED,
    JOB_TAG,
    KEPT,
    JobRuns,
    fate,
    identity_of,
    job_tags,
    quoted,
)
from pollux_agent.protocol import REPORT_TAG, JobSpec
from pollux_agent.report.client import is_missing
from pollux_agent.report.outbox import Point

if TYPE_CHECKING:
    from mlflow.entities import Run

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

END_TAG, END_MESSAGE_TAG = "pollux.end", "pollux.end_message"
"""How a run's job ended; a run that is opened again has neither."""

_MAX_MESSAGE_CHARS = 1000
_BATCH_POINTS = 500


class ModelStore:
    """MLflow as one deployment's model store.

    Nothing is called before the first method. Each raises StoreUnavailable when MLflow does not answer
    (within about five seconds a call) and StoreError when it refuses.
    """

    def __init__(
        self,
        tracking_uri: str,
        *,
        experiment: str = "pollux",
        decisions_experiment: str = "pollux-decisions",
        deployment: str = "airflow",
    ) -> None:
        self._connection = Connection(tracking_uri)
        self._experiment = experiment
        self._decisions_experiment = decisions_experiment
        self._deployment = deployment

    @cached_property
    def experiment_id(self) -> str:
        """The id of the experiment with the jobs' runs."""
        return self._connection.experiment(self._experiment)

    def ensure_run(self, job_id: str, identity: JobIdentity, spec: JobSpec, submitted_unix_s: float) -> str:
        """The id of the job's run, made if there is none; whoever asks at the same time gets the same one."""
        runs = JobRuns(self._connection, self.experiment_id, identity.deployment)
        return runs.ensure(
            job_id, tags=job_tags(job_id, identity), spec=spec, start_ms=int(submitted_unix_s * 1000)
        )

    def reports(self) -> Mapping[str, JobRecord]:
        """Every run that is still RUNNING, by job, with what its report holds; one paged query."""
        found = self._connection.search(
            self.experiment_id,
            f"tags.\"{DEPLOYMENT_TAG}\" = '{quoted(self._deployment)}' and attributes.status = 'RUNNING'",
        )
        chosen: dict[str, Run] = {}
        for run in found:
            job_id = run.data.tags.get(JOB_TAG)
            if job_id is None or fate(run) == DROPPED:
                continue
            if job_id not in chosen or fate(run) == KEPT:
                chosen[job_id] = run
        return {job_id: _record(job_id, run) for job_id, run in chosen.items()}

    def reopen_run(self, job_id: str, run_id: str, *, unless_finished: bool = False) -> JobRecord:
        """The record of a run that :meth:`reports` lacks: set to RUNNING again, or why that cannot be.

        With ``unless_finished`` a FINISHED one is left so.
        """
        from mlflow.exceptions import MlflowException

        with self._connection.calling() as client:
            try:
                run = client.get_run(run_id)
            except MlflowException as error:
                if not is_missing(error):
                    raise
                return JobRecord(run_id=run_id, remarks=(f"not fitted: its MLflow run {run_id} is gone",))
            if run.info.lifecycle_stage != "active":
                return JobRecord(
                    run_id=run_id,
                    remarks=(f"not fitted: its MLflow run {run_id} was deleted; restore it in MLflow",),
                )
            if run.info.status not in ("RUNNING", *(("FINISHED",) if unless_finished else ())):
                for name in {END_TAG, END_MESSAGE_TAG} & run.data.tags.keys():
                    client.delete_tag(run_id, name)
                client.update_run(run_id, status="RUNNING")
        return _record(job_id, run)

    def close_run(self, run_id: str, status: RunStatus, *, how: str = "", message: str = "") -> None:
        """End a run, with tags that say how in a word and in a sentence."""
        with self._connection.calling() as client:
            for name, value in ((END_TAG, how), (END_MESSAGE_TAG, message[:_MAX_MESSAGE_CHARS])):
                if value:
                    client.set_tag(run_id, name, value)
            client.set_terminated(run_id, status=status)

    def add_figures(self, run_id: str, points: Sequence[Point]) -> None:
        """Log what a job's workers could not; the same point twice stays one."""
        from mlflow.entities import Metric

        for start in range(0, len(points), _BATCH_POINTS):
            batch = points[start : start + _BATCH_POINTS]
            with self._connection.calling() as client:
                client.log_batch(
                    run_id,
                    metrics=[Metric(point.name, point.value, point.time_ms, point.step) for point in batch],
                )

    def record_decision(
        self,
        *,
        decision: int,
        now_unix_s: float,
        figures: Mapping[str, float],
        earlier: Mapping[int, Mapping[str, float]],
        wall_clock_s: Mapping[str, float],
        documents: Mapping[str, str],
    ) -> str:
        """Record one decision's figures at its number; the id of the run that holds them.

        ``earlier`` holds what is known by now of decisions before, by their numbers. ``wall_clock_s`` are
        seconds that no seed fixes, kept apart by name. Documents (name -> text) above 64 KiB are left out.
        """
        return self._decision_runs().record(
            decision=decision,
            now_unix_s=now_unix_s,
            figures=figures,
            earlier=earlier,
            wall_clock_s=wall_clock_s,
            documents=documents,
        )

    def newest_decision(self) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
        """Figures and wall-clock seconds of the last decision recorded, None before the first."""
        return self._decision_runs().newest()

    def _decision_runs(self) -> DecisionRuns:
        experiment_id = self._connection.experiment(self._decisions_experiment)
        return DecisionRuns(self._connection, experiment_id, self._deployment)


def _record(job_id: str, run: "Run") -> JobRecord:
    report, remarks = read_report(job_id, run.data.tags.get(REPORT_TAG))
    skewed = is_newer(run.data.tags.get(REPORT_TAG))
    return JobRecord(
        run_id=run.info.run_id,
        identity=identity_of(run.data.tags),
        report=report,
        remarks=remarks,
        skewed=skewed,
    )
