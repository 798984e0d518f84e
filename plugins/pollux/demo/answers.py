"""The end of a run: waits for its last figures, and exports what Airflow's REST API says about it."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pollux.airflow_api import AirflowApi
from pollux.demo.follow import Watchdog
from pollux.demo.jobs import SCHEDULE_DAG, TRAIN_DAG
from pollux.errors import StoreError
from pollux.verify import EXPORT_FILE
from pollux.verify.export import export_document
from pollux.verify.runs import read_runs
from pollux_agent.records import write_atomic

_PAGE = 100
_POLL_S = 0.5


def await_runs(database: Path, *, num_runs: int, timeout_s: float) -> None:
    """Wait until MLflow's file has that many finished runs of jobs, or the time is over.

    A worker sends its last figures for some seconds only; the next scheduling cycle closes a run that
    stayed open. What is still missing then is for the checks to tell.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with suppress(StoreError):
            if sum(run.status == "FINISHED" for run in read_runs(database)) >= num_runs:
                return
        time.sleep(_POLL_S)


def end_schedule(api: AirflowApi, *, stall_s: float, logs: Path) -> None:
    """Pause the scheduling DAG and wait for its last run, so that the export is complete."""
    api.set_paused(SCHEDULE_DAG, True)
    watchdog = Watchdog("waiting for the last scheduling run", stall_s=stall_s, where=logs)
    while active := [run.run_id for run in api.dag_runs(SCHEDULE_DAG) if not run.is_final]:
        watchdog.feed(tuple(active), time.monotonic())
        time.sleep(_POLL_S)


def export_answers(api: AirflowApi, state: Path) -> Path:
    """Write ``airflow-export.json``: runs and task instances of the training and the scheduling DAG."""
    dag_runs: list[dict[str, Any]] = []
    task_instances: list[dict[str, Any]] = []
    for dag in (TRAIN_DAG, SCHEDULE_DAG):
        dag_runs += _all(api, f"/dags/{dag}/dagRuns", "dag_runs")
        task_instances += _all(api, f"/dags/{dag}/dagRuns/~/taskInstances", "task_instances")
    document = export_document(
        exported_unix_s=time.time(),
        schedule_dag_id=SCHEDULE_DAG,
        dag_runs=dag_runs,
        task_instances=task_instances,
    )
    path = state / EXPORT_FILE
    write_atomic(path, json.dumps(document, indent=1).encode())
    return path


def _all(api: AirflowApi, path: str, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        page = api.get(path, limit=_PAGE, offset=len(found))
        found += page[key]
        if not page[key] or len(found) >= page["total_entries"]:
            return found
