"""The short end-to-end run with Airflow and MLflow on PostgreSQL: two trainings share the cluster."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from postgres_server import PostgresServer, postgres_server
from trainings import Training

from pollux.airflow_api import AirflowApi
from pollux.stack.control import running_stack
from pollux.stack.processes import wait_until
from pollux.stack.record import StackPlan
from pollux_agent.protocol import DriverEvent, JobFolder, decode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


@dataclass(frozen=True, slots=True)
class PostgresStack:
    state: Path
    api: AirflowApi
    server: PostgresServer


@pytest.fixture
def on_postgres(tmp_path: Path) -> Iterator[PostgresStack]:
    with postgres_server() as server:
        file = tmp_path / "databases.json"
        file.touch(mode=0o600)
        file.write_text(json.dumps({name: server.url(name) for name in ("airflow", "mlflow")}))
        plan = StackPlan(
            state=tmp_path / "state",
            databases=file,
            interval_s=5.0,
            report_interval_s=2.0,
            checkpoint_interval_s=2.0,
            slot_cap=0.5,
        )
        with running_stack(plan) as record:
            with AirflowApi.from_login(record.airflow_url, record.login) as api:
                yield PostgresStack(plan.state, api, server)


WAIT_S = 300.0
"""A busy machine starts workers slowly."""


def gpus(job: Any) -> int:
    return sum(job.status.held.values()) if job is not None and job.status.phase == "running" else 0


def sizes(state: Path, job_id: str) -> list[int]:
    """GPU counts of a job's starts, in order, as its driver wrote them down."""
    lines = JobFolder(state / "jobs" / job_id).driver_events.read_bytes().splitlines()
    events = [decode(DriverEvent, line) for line in lines]
    return [sum(event.placement.values()) for event in events if event.event == "start"]


def test_two_jobs_share_the_cluster_and_all_tables_are_in_postgres(on_postgres: PostgresStack) -> None:
    state, server = on_postgres.state, on_postgres.server
    first = Training(on_postgres, name="first", epochs=500, max_gpus=4, arguments=["--width", "4"])
    first.wait(lambda job, task: gpus(job) >= 2, "it grows", WAIT_S)
    whole = {"kind": "rigid", "min_gpus": 3, "max_gpus": 3}
    second = Training(on_postgres, name="second", epochs=2, arguments=["--width", "4"], **whole)
    done = second.wait(lambda job, task: task.state == "success", "the other one trains to its end", WAIT_S)
    on_postgres.api.set_state("pollux_train", first.run.run_id, "train", "success")
    ended = first.wait(lambda job, task: job is not None and job.status.phase == "ended", "it ends", WAIT_S)

    grown_to, *later = sizes(state, ended.job_id)[1:]
    assert grown_to > 1, "it grew"
    assert 1 in later, "and shrank so that three of the four GPUs came free"
    assert sizes(state, done.job_id) == [3]
    ends = f"SELECT status FROM runs WHERE run_uuid = '{done.mlflow_run_id}'"
    assert wait_until(lambda: server.query("mlflow", ends) == [("FINISHED",)], WAIT_S)
    tagged = f"SELECT count(*) FROM tags WHERE key = 'pollux.report' AND run_uuid = '{done.mlflow_run_id}'"
    assert server.query("mlflow", tagged) == [(1,)]
    states = dict(
        server.query("airflow", "SELECT run_id, state FROM task_instance WHERE dag_id = 'pollux_train'")
    )
    assert states == {first.run.run_id: "success", second.run.run_id: "success"}
    cycles = "SELECT count(*) FROM task_instance WHERE dag_id = 'pollux_schedule' AND state = 'success'"
    assert int(str(server.query("airflow", cycles)[0][0])) > 3
    assert not list(state.rglob("*.db"))
    assert_password_is_hidden(state, server.password)


def assert_password_is_hidden(state: Path, password: str) -> None:
    """Neither a command line, which every user of the machine sees, nor a log or record has it."""
    for process in psutil.process_iter():
        try:
            assert password not in " ".join(process.cmdline()), process
        except psutil.Error:
            continue
    for path in state.rglob("*"):
        if path.is_file():
            assert password.encode() not in path.read_bytes(), path
