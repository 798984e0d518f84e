"""The real stack: ready, shut to strangers, on loopback only, small, and gone without a trace."""

import json
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pollux.airflow_api import AirflowApi, TaskInstance
from pollux.errors import AirflowApiError, AirflowUnavailable
from pollux.stack import control
from pollux.stack.memory import stack_processes, total_bytes
from pollux.stack.processes import is_alive, wait_until
from pollux.stack.record import read_record
from pollux.stack.services import airflow_health

pytestmark = pytest.mark.e2e

IDLE_LIMIT_BYTES = 2.2e9
POLLUX = str(Path(sys.executable).with_name("pollux"))
WAIT_S = 60.0


def client(transport: httpx.HTTPTransport | None = None) -> httpx.Client:
    return httpx.Client(transport=transport, timeout=WAIT_S, trust_env=False)


def test_every_service_says_that_it_is_well(stack: Any) -> None:
    parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
    well = dict.fromkeys(parts, "healthy")
    assert wait_until(lambda: airflow_health(stack.airflow_url) == well, WAIT_S)
    with client() as http:
        assert http.get(f"{stack.mlflow_url}/health").text == "OK"
    with client(httpx.HTTPTransport(uds=str(stack.state / "local.sock"))) as http:
        assert http.get("http://local/health").json()["ok"] is True


def test_nothing_listens_beyond_loopback(stack: Any) -> None:
    record = read_record(stack.state)
    assert record is not None
    addresses = {
        connection.laddr
        for process in stack_processes(record)
        for connection in psutil.Process(process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {address.port for address in addresses} >= {
        record.airflow_port,
        record.execution_port,
        record.mlflow_port,
    }
    assert {address.ip for address in addresses} <= {"127.0.0.1", "::1"}
    assert stat.S_IMODE((stack.state / "local.sock").stat().st_mode) == 0o600


def test_a_stranger_is_refused_everywhere(stack: Any) -> None:
    with client() as http:
        for path in ("/api/v2/dags", "/api/v2/connections", "/pollux/"):
            assert http.get(stack.airflow_url + path).status_code == 401, path
    with AirflowApi(stack.airflow_url, user="admin", password="wrong") as stranger:
        with pytest.raises(AirflowApiError, match="log-in as 'admin': 401"):
            stranger.dag("pollux_schedule")


def test_the_password_is_in_one_private_file_and_in_no_log(stack: Any) -> None:
    login = stack.record.login
    (password,) = json.loads(login.read_text()).values()
    assert stat.S_IMODE(login.stat().st_mode) == 0o600
    logs = [path for path in stack.state.rglob("*.log") if path.is_file()]
    assert logs
    assert [path for path in logs if password in path.read_text(errors="replace")] == []


def test_the_dags_are_read_without_errors(stack: Any) -> None:
    def known() -> bool:
        dags = [stack.api.dag(name) for name in ("pollux_schedule", "pollux_train")]
        return all(dag is not None and not dag.is_paused for dag in dags)

    assert wait_until(known, WAIT_S), stack.api.import_errors()
    assert stack.api.import_errors() == {}
    assert stack.api.dag("no_such_dag") is None


def test_the_scheduling_dag_runs_again_and_again(stack: Any) -> None:
    """A run that was late by more than a period is skipped, so each one's task is asked."""

    def cycles() -> list[TaskInstance]:
        runs = [run for run in stack.api.dag_runs("pollux_schedule") if run.state == "success"]
        return [task for run in runs for task in stack.api.task_instances("pollux_schedule", run.run_id)]

    def succeeded() -> list[TaskInstance]:
        return [task for task in cycles() if task.state == "success"]

    assert wait_until(lambda: len(succeeded()) >= 2, 2 * WAIT_S), cycles()
    task = succeeded()[0]
    assert (task.task_id, task.try_number, task.map_index) == ("cycle", 1, -1)
    assert stack.api.task_instance("pollux_schedule", task.run_id, "cycle") == task
    assert "::endgroup::" in stack.api.log("pollux_schedule", task.run_id, "cycle", try_number=1)


def test_a_form_that_breaks_its_schema_is_refused_in_airflows_words(stack: Any) -> None:
    assert wait_until(lambda: stack.api.dag("pollux_train") is not None, WAIT_S)
    with pytest.raises(AirflowApiError, match=r"POST /dags/pollux_train/dagRuns: 400"):
        stack.api.trigger("pollux_train", {"min_gpus": "many"})


def test_requests_that_come_at_once_are_all_served(stack: Any) -> None:
    def unpause(times: int) -> None:
        with AirflowApi.from_login(stack.airflow_url, stack.record.login) as api:
            for _ in range(times):
                api.set_paused("pollux_train", False)

    with ThreadPoolExecutor(3) as people:
        assert list(people.map(unpause, [4] * 3)) == [None] * 3


def test_an_airflow_that_is_not_there_is_unavailable() -> None:
    with AirflowApi("http://127.0.0.1:9", user="admin", password="") as api:
        with pytest.raises(AirflowUnavailable, match="ConnectError"):
            api.dag("pollux_train")


def test_the_idle_stack_is_small(stack: Any) -> None:
    record = read_record(stack.state)
    assert record is not None
    assert 0.3e9 < total_bytes(stack_processes(record)) < IDLE_LIMIT_BYTES


def pollux_stack(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [POLLUX, "stack", *arguments], capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.timeout(600)
def test_life_of_a_stack(tmp_path: Path) -> None:
    """Up, up again, a killed triggerer, a killed supervisor, up on the old state, down."""
    state = ("--state", str(tmp_path / "s"))
    try:
        first = pollux_stack("up", *state, "--detach", "--json")
        assert first.returncode == 0, first.stderr
        urls = {key: json.loads(first.stdout)[key] for key in ("airflow_url", "mlflow_url")}
        again = pollux_stack("up", *state, "--detach")
        assert again.returncode == 0
        assert "running already" in again.stdout
        assert urls["airflow_url"] in again.stdout

        record = read_record(tmp_path / "s")
        assert record is not None
        triggerer = record.components["airflow-triggerer"].process
        assert triggerer is not None
        os.kill(triggerer.pid, signal.SIGKILL)

        def restarted() -> bool:
            now = read_record(tmp_path / "s")
            part = now.components["airflow-triggerer"] if now else None
            return part is not None and part.ready and part.restarts == 1

        assert wait_until(restarted, WAIT_S)

        record = read_record(tmp_path / "s")
        assert record is not None
        processes = stack_processes(record)
        assert len(processes) > 8
        os.kill(record.supervisor.pid, signal.SIGKILL)
        assert wait_until(lambda: not any(map(is_alive, processes)), WAIT_S)
        assert pollux_stack("status", *state).returncode == 1

        second = pollux_stack("up", *state, "--detach", "--json")
        assert second.returncode == 0, second.stderr
        assert {key: json.loads(second.stdout)[key] for key in urls} == urls
        record = read_record(tmp_path / "s")
        assert record is not None
        processes = stack_processes(record)
        assert pollux_stack("status", *state, "--json").returncode == 0
    finally:
        down = pollux_stack("down", *state)
    assert down.returncode == 0, down.stderr
    assert not any(map(is_alive, processes))
    assert "nothing runs" in pollux_stack("down", *state).stdout


def test_a_foreground_up_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    state = tmp_path / "s"
    front = subprocess.Popen([POLLUX, "stack", "up", "--state", str(state)], stdout=subprocess.DEVNULL)
    try:
        assert wait_until(
            lambda: (record := read_record(state)) is not None and len(record.leaders) > 1, WAIT_S
        )
        record = read_record(state)
        assert record is not None
        processes = stack_processes(record)
        front.send_signal(signal.SIGINT)
        assert front.wait(WAIT_S) == 1
        assert not any(map(is_alive, processes))
    finally:
        front.kill()
        front.wait()
        control.down(state)


def test_a_folder_of_dags_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    result = pollux_stack("up", "--state", str(tmp_path / "s"), "--dags", str(tmp_path / "none"), "--detach")
    assert result.returncode == 2
    assert "--dags" in result.stderr
    assert not (tmp_path / "s").exists()
