"""One run per job, however many ask for it at once.

MLflow has no "create if absent". But a parameter of a run can be set once only, so it decides for each
run, for good, whether it is *kept* as the job's run or *dropped* as a duplicate. Whoever wants to keep a
run first drops every other one that it sees. Two runs cannot both be kept: each keeper would have looked
before the other's run was there, and after its own was.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pollux.cluster.base import JobIdentity
from pollux.errors import StoreError, StoreUnavailable
from pollux.store.connection import Connection
from pollux_agent.protocol import JobSpec

if TYPE_CHECKING:
    from mlflow.entities import Run

JOB_TAG = "pollux.job_id"
DEPLOYMENT_TAG = "pollux.deployment"

FATE_PARAM = "pollux.run_of_job"
KEPT = "kept"
DROPPED = "duplicate"

_MAX_ROUNDS = 10
_MAX_PARAM_CHARS = 500
"""MLflow refuses long values, some servers those above this; a run is there to compare, the spec to keep."""


def job_tags(job_id: str, identity: JobIdentity) -> dict[str, str]:
    return {
        JOB_TAG: job_id,
        DEPLOYMENT_TAG: identity.deployment,
        "pollux.dag_id": identity.dag_id,
        "pollux.dag_run_id": identity.run_id,
        "pollux.task_id": identity.task_id,
        "pollux.map_index": str(identity.map_index),
    }


def identity_of(tags: Mapping[str, str]) -> JobIdentity | None:
    """The inverse of :func:`job_tags`; None for tags that are none of ours."""
    try:
        return JobIdentity(
            deployment=tags[DEPLOYMENT_TAG],
            dag_id=tags["pollux.dag_id"],
            run_id=tags["pollux.dag_run_id"],
            task_id=tags["pollux.task_id"],
            map_index=int(tags["pollux.map_index"]),
        )
    except (KeyError, ValueError):
        return None


def spec_params(spec: JobSpec) -> dict[str, str]:
    """What people compare runs by; never the environment variables, which may hold secrets."""
    values = {
        "name": spec.name,
        "script": spec.script,
        "arguments": " ".join(spec.arguments),
        "kind": spec.kind,
        "model": spec.model,
        "initial_batch_size": spec.initial_batch_size,
        "max_batch_size": spec.batch_size_limit,
        "max_local_batch_size": spec.max_local_batch_size,
        "min_local_batch_size": spec.min_local_batch_size,
        "min_gpus": spec.min_gpus,
        "max_gpus": spec.max_gpus,
        "scaling_rule": spec.scaling_rule,
        "epochs": spec.epochs,
        "preemptible": spec.preemptible,
        "gpu_types": ",".join(spec.gpu_types),
        "priority": spec.priority if spec.priority != 1.0 else None,
        "team": spec.team,
        "estimator": spec.estimator if spec.estimator != "training" else None,
    }
    return {name: _short(str(value)) for name, value in values.items() if value not in ("", None)}


def _short(value: str) -> str:
    return value if len(value) <= _MAX_PARAM_CHARS else value[: _MAX_PARAM_CHARS - 3] + "..."


class JobRuns:
    """The runs of one deployment's jobs in one experiment."""

    def __init__(self, connection: Connection, experiment_id: str, deployment: str) -> None:
        self._connection = connection
        self._experiment_id = experiment_id
        self._deployment = deployment

    def ensure(self, job_id: str, *, tags: Mapping[str, str], spec: JobSpec, start_ms: int) -> str:
        """The id of the job's run, the same for everyone who asks; made if there is none."""
        for _ in range(_MAX_ROUNDS):
            runs = self._of_job(job_id)
            if not runs:
                self._create(spec, tags=tags, start_ms=start_ms)
                runs = self._of_job(job_id)
            kept = self._settle(runs)
            if kept is not None:
                self._complete(kept, spec)
                return str(kept.info.run_id)
        raise StoreUnavailable(f"MLflow: the run of job {job_id} is still disputed; try again")

    def _of_job(self, job_id: str) -> "list[Run]":
        return self._connection.search(
            self._experiment_id,
            f"tags.\"{JOB_TAG}\" = '{quoted(job_id)}' "
            f"and tags.\"{DEPLOYMENT_TAG}\" = '{quoted(self._deployment)}'",
        )

    def _create(self, spec: JobSpec, *, tags: Mapping[str, str], start_ms: int) -> None:
        with self._connection.calling() as client:
            client.create_run(self._experiment_id, start_time=start_ms, tags=dict(tags), run_name=spec.name)

    def _settle(self, runs: "list[Run]") -> "Run | None":
        """The run that is kept, the others dropped and deleted; None where somebody else was quicker."""
        runs = sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))
        open_to = [run for run in runs if fate(run) != DROPPED]
        hopeful = next((run for run in open_to if fate(run) == KEPT), next(iter(open_to), None))
        for run in runs:
            if run is hopeful:
                continue
            if self._decide(run, DROPPED) != DROPPED:
                return None
            self._delete(run)
        return hopeful if hopeful is not None and self._decide(hopeful, KEPT) == KEPT else None

    def _decide(self, run: "Run", wanted: str) -> str:
        """Set the run's fate unless somebody has, and return what it is."""
        if fate(run) == wanted:
            return wanted
        from mlflow.exceptions import MlflowException

        with self._connection.calling() as client:
            try:
                client.log_param(run.info.run_id, FATE_PARAM, wanted)
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                now = client.get_run(run.info.run_id)
                return DROPPED if now.info.lifecycle_stage != "active" else fate(now)
        return wanted

    def _delete(self, run: "Run") -> None:
        with self._connection.calling() as client:
            client.delete_run(run.info.run_id)

    def _complete(self, run: "Run", spec: JobSpec) -> None:
        """Log the spec if nobody has; several may be at it at once, and one of them gets through."""
        if _is_complete(run):
            return
        from mlflow.entities import Param

        params = [Param(name, value) for name, value in spec_params(spec).items()]
        try:
            with self._connection.calling() as client:
                client.log_batch(run.info.run_id, params=params)
        except StoreError:
            with self._connection.calling() as client:
                if not _is_complete(client.get_run(run.info.run_id)):
                    raise


def _is_complete(run: "Run") -> bool:
    return "initial_batch_size" in run.data.params


def fate(run: "Run") -> str:
    """kept, duplicate, or empty while nobody has decided."""
    return str(run.data.params.get(FATE_PARAM, ""))


def quoted(text: str) -> str:
    """The text for a filter's single quotes; MLflow has no escape for one, so such a name is refused."""
    if "'" in text or "\\" in text:
        raise StoreError(f"{text!r}: quotes and backslashes cannot be searched for; use another name")
    return text
