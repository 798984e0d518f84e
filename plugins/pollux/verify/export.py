"""What Airflow's REST API answered at the end of a run, saved as ``airflow-export.json``."""

from typing import Any, Literal

from pydantic import AwareDatetime, ConfigDict
from pydantic.dataclasses import dataclass

_ANSWER = ConfigDict(extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True, config=_ANSWER)
class DagRun:
    """One DAG run; fields of Airflow's answer that are not named here are kept in the file and ignored."""

    dag_id: str
    dag_run_id: str
    state: str
    run_type: str = ""
    queued_at: AwareDatetime | None = None
    start_date: AwareDatetime | None = None
    end_date: AwareDatetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_ANSWER)
class TaskInstance:
    """One task instance in its last try."""

    dag_id: str
    dag_run_id: str
    task_id: str
    map_index: int = -1
    state: str | None = None
    try_number: int = 0
    start_date: AwareDatetime | None = None
    end_date: AwareDatetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class AirflowExport:
    """DAG runs and task instances of the training and the scheduling DAG, as Airflow answered them."""

    schema: Literal[1] = 1
    exported_unix_s: float
    schedule_dag_id: str
    dag_runs: tuple[DagRun, ...] = ()
    task_instances: tuple[TaskInstance, ...] = ()


def export_document(
    *,
    exported_unix_s: float,
    schedule_dag_id: str,
    dag_runs: list[dict[str, Any]],
    task_instances: list[dict[str, Any]],
) -> dict[str, Any]:
    """The file's content from raw answers: they are stored whole, so that a reader finds every field."""
    return {
        "schema": 1,
        "exported_unix_s": exported_unix_s,
        "schedule_dag_id": schedule_dag_id,
        "dag_runs": dag_runs,
        "task_instances": task_instances,
    }
