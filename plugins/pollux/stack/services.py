"""The services of the stack: command lines, environment, and how each shows that it is ready."""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from pollux.local.ports import LOOPBACK
from pollux.stack.databases import databases
from pollux.stack.processes import MARK_VARIABLE
from pollux.stack.record import StackRecord
from pollux_agent.records import write_atomic

ADMIN = "admin"
PROBE_TIMEOUT_S = 3.0
MAX_LOG_BYTES = 32 * 1024 * 1024
HEARTBEAT_TIMEOUT_S = 90
"""How long a task, which beats each second, may be silent before Airflow takes it for dead. Until then the
next cycle waits for one whose process was killed, and an operator's retry for the try before it."""
_IDLE_WORKER = "airflow worker -- LocalExecutor: <idle>"
"""One of these holds the lock of the queue that all of them wait for, and takes it to its grave."""
_API_LOCK_WAIT_S = 3
"""How long the server of REST API and UI waits for SQLite's lock, see :func:`_airflow`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A program that the supervisor keeps running, or with ``once`` runs to its end.

    It starts when everything in ``after`` is ready (a ``once`` program: has succeeded) and is asked to end
    in wave ``stop_wave``, lowest first, with ``grace_s`` before what is left of it is killed. Where another
    service tells whether it is ``ready``, that is ``told_by``. Once a child whose command line has
    ``lasting`` in it was killed, the service works no more.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    ready: Callable[[], bool] = lambda: True
    after: tuple[str, ...] = ()
    once: bool = False
    stop_wave: int = 0
    grace_s: float = 15.0
    told_by: str = ""
    lasting: str = ""


def services(record: StackRecord) -> tuple[Service, ...]:
    """Airflow, MLflow and the local cluster as ``record`` places them; no local one beside Kubernetes."""
    local = (_local_cluster(record),) if record.plan.has_local_cluster else ()
    return (*local, _mlflow(record), *_airflow(record))


def prepare(record: StackRecord) -> None:
    """Make the folders, the log-in file and the cluster file that the services expect."""
    state = record.plan.state
    for folder in ("logs", "mlflow", "airflow", "airflow/plugins"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    if not record.login.exists():
        write_atomic(record.login, json.dumps({ADMIN: secrets.token_urlsafe(12)}).encode())
    if record.plan.cluster is not None:
        write_atomic(state / "cluster.json", record.plan.cluster.read_bytes())


def log_path(state: Path, name: str) -> Path:
    return state / "logs" / f"{name}.log"


def keep_logs_small(state: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move what a log of more than ``max_bytes`` holds to a file ending in ``.1``, over what that held.

    The services append, so they write on from the beginning; a line of that very moment may be lost. A disk
    that has no room for both keeps the new file.
    """
    for path in log_path(state, "any").parent.glob("*.log"):
        with suppress(OSError):
            if path.stat().st_size > max_bytes:
                with suppress(OSError):
                    shutil.copyfile(path, path.with_name(f"{path.name}.1"))
                os.truncate(path, 0)


def base_environment(record: StackRecord) -> dict[str, str]:
    """What every service sees: this process's environment without anyone's Airflow and MLflow settings."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AIRFLOW", "MLFLOW_", "_MLFLOW"))
    }
    plan = record.plan
    environ |= {
        MARK_VARIABLE: record.mark,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": f"{LOOPBACK},localhost",
        "no_proxy": f"{LOOPBACK},localhost",
        "POLLUX_STATE": str(plan.state),
        "POLLUX_INTERVAL_S": str(plan.interval_s),
        "POLLUX_SCRIPTS": str(plan.scripts),
        "POLLUX_MLFLOW_URL": record.mlflow_url,
        "POLLUX_AIRFLOW_URL": record.airflow_url,
        "POLLUX_AIRFLOW_LOGIN": str(record.login),
        "MLFLOW_TRACKING_URI": record.mlflow_url,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    return environ | dict(plan.settings)


def _local_cluster(record: StackRecord) -> Service:
    plan = record.plan
    command = [str(Path(sys.executable).with_name("pollux")), "local", "serve"]
    command += ["--state", str(plan.state), "--scripts", str(plan.scripts)]
    if plan.slot_cap is not None:
        command += ["--slot-cap", str(plan.slot_cap)]
    if plan.report_interval_s is not None:
        command += ["--report-interval", str(plan.report_interval_s)]
    if plan.checkpoint_interval_s is not None:
        command += ["--checkpoint-interval", str(plan.checkpoint_interval_s)]
    socket = plan.state / "local.sock"
    return Service(
        name="local",
        command=tuple(command),
        environ=base_environment(record),
        ready=lambda: _answers("http://local/health", uds=str(socket)),
        grace_s=40.0,
    )


def _mlflow(record: StackRecord) -> Service:
    folder = record.plan.state / "mlflow"
    command = (
        *(sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(record.mlflow_port)),
        *("--artifacts-destination", str(folder / "artifacts"), "--workers", "1"),
    )
    environ = base_environment(record) | _small() | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environ["MLFLOW_BACKEND_STORE_URI"] = databases(record.plan.state, record.plan.databases).mlflow
    del environ["MLFLOW_TRACKING_URI"]
    return Service(
        name="mlflow",
        command=command,
        environ=environ,
        ready=lambda: _answers(f"{record.mlflow_url}/health"),
        stop_wave=1,
    )


def _airflow(record: StackRecord) -> tuple[Service, ...]:
    """Airflow's components. REST API and UI have a server of their own, apart from that of the tasks.

    Airflow 3.3 writes its audit log in the event loop of the server, which also ends the transactions of the
    requests that it serves. With SQLite's one writer these two can wait for each other, until the wait for
    the lock ends and a request fails. Apart, tasks never wait so; a person's request may, if another comes at
    the same moment, and then for a short time.
    """
    environ = base_environment(record) | _small() | airflow_settings(record)
    plan = record.plan
    api_database = databases(plan.state, plan.databases, lock_wait_s=_API_LOCK_WAIT_S).airflow

    def service(
        name: str,
        *arguments: str,
        ready: Callable[[], bool],
        told_by: str = "",
        lasting: str = "",
        **settings: str,
    ) -> Service:
        return Service(
            name=name,
            command=(sys.executable, "-m", "airflow", *arguments),
            environ=environ | settings,
            ready=ready,
            after=("airflow-migrate",),
            grace_s=10.0,
            told_by=told_by,
            lasting=lasting,
        )

    def told(name: str, *arguments: str, component: str, lasting: str = "") -> Service:
        """One that has no server of its own: the health page knows when it was last at work."""
        ready = healthy(component)
        return service(name, *arguments, ready=ready, told_by="airflow-api-server", lasting=lasting)

    def healthy(component: str) -> Callable[[], bool]:
        return lambda: airflow_health(record.airflow_url).get(component) == "healthy"

    return (
        Service(
            name="airflow-migrate",
            command=(sys.executable, "-m", "airflow", "db", "migrate"),
            environ=environ,
            once=True,
        ),
        service(
            "airflow-api-server",
            *("api-server", "--apps", "core"),
            ready=healthy("metadatabase"),
            AIRFLOW__DATABASE__SQL_ALCHEMY_CONN=api_database,
        ),
        service(
            "airflow-execution-api",
            *("api-server", "--apps", "execution", "--port", str(record.execution_port)),
            ready=lambda: _answers(f"{record.execution_url}health"),
        ),
        told(
            "airflow-scheduler",
            *("scheduler", "--skip-serve-logs"),
            component="scheduler",
            lasting=_IDLE_WORKER,
        ),
        told("airflow-dag-processor", "dag-processor", component="dag_processor"),
        told("airflow-triggerer", "triggerer", "--skip-serve-logs", component="triggerer"),
    )


def airflow_settings(record: StackRecord) -> dict[str, str]:
    """Airflow's own settings as its environment variables."""
    home = record.plan.state / "airflow"
    sections = {
        "core": {
            "executor": "LocalExecutor",
            "parallelism": "4",
            "load_examples": "False",
            "dags_folder": str(record.plan.dags),
            "plugins_folder": str(home / "plugins"),
            "simple_auth_manager_users": f"{ADMIN}:admin",
            "simple_auth_manager_passwords_file": str(record.login),
            "execution_api_server_url": record.execution_url,
        },
        "api": {
            "host": LOOPBACK,
            "port": str(record.airflow_port),
            "base_url": record.airflow_url,
            "workers": "1",
            "expose_stacktrace": "False",
        },
        "database": {"sql_alchemy_conn": databases(record.plan.state, record.plan.databases).airflow},
        "dag_processor": {
            "refresh_interval": "5",
            "min_file_process_interval": "30",
            "parsing_processes": "1",
        },
        "logging": {"base_log_folder": str(home / "logs")},
        "scheduler": {
            "scheduler_idle_sleep_time": "0.25",
            "orphaned_tasks_check_interval": "20",
            "task_instance_heartbeat_timeout": str(HEARTBEAT_TIMEOUT_S),
        },
        "triggerer": {"capacity": "200"},
        "workers": {"min_heartbeat_interval": "1"},
    }
    settings = {
        f"AIRFLOW__{section.upper()}__{option.upper()}": value
        for section, options in sections.items()
        for option, value in options.items()
    }
    return settings | {"AIRFLOW_HOME": str(home)}


def airflow_health(url: str) -> dict[str, str]:
    """Airflow component -> healthy or not, as its API server tells; empty while it does not answer."""
    try:
        answer = _get(f"{url}/api/v2/monitor/health")
        answer.raise_for_status()
        return {name: str(part.get("status")) for name, part in answer.json().items() if part}
    except (httpx.HTTPError, ValueError, AttributeError):
        return {}


def _small() -> dict[str, str]:
    """Settings that keep a Python service's memory down: few malloc arenas and no numeric thread pools."""
    return {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _answers(url: str, *, uds: str | None = None) -> bool:
    try:
        return _get(url, uds=uds).is_success
    except (httpx.HTTPError, OSError):
        return False


def _get(url: str, *, uds: str | None = None) -> httpx.Response:
    """Our services speak no TLS, and certificates take a tenth of a second to load for each probe."""
    transport = httpx.HTTPTransport(uds=uds, verify=False)
    with httpx.Client(transport=transport, timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
        return client.get(url)
