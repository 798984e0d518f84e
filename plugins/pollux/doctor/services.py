"""Airflow and MLflow: whether they answer, know us, and let us do what we need."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx

from pollux.airflow_api import AirflowApi
from pollux.doctor.finding import Finding, failed, ok, warning
from pollux.errors import AirflowApiError, ConfigError, StoreError
from pollux.settings import Settings
from pollux.store.connection import Connection
from pollux_agent.report.client import without_password

SCHEDULE_DAG = "pollux_schedule"
_TIMEOUT_S = 10.0
_SEARCH = "/api/2.0/mlflow/experiments/search"


def check_airflow(config: Settings, *, login_elsewhere: bool = False) -> Iterator[Finding]:
    """Its REST API, its components, and the scheduling DAG. ``login_elsewhere``: Airflow's own pods have a
    log-in, where the doctor has none.
    """
    lacks = {
        "POLLUX_AIRFLOW_URL": "" if config.airflow_url else "airflow.url",
        "POLLUX_AIRFLOW_LOGIN": "" if config.airflow_login else "airflow.loginSecret",
    }
    if login_elsewhere and config.airflow_url and config.airflow_login is None:
        yield warning(
            "Airflow",
            "not tried: the release's log-in is a file in Airflow's pods",
            "name a file like it here: POLLUX_AIRFLOW_LOGIN=login.json (helm test tries the release's own)",
        )
        return
    if any(lacks.values()):
        unset = [variable for variable, value in lacks.items() if value]
        yield warning(
            "Airflow",
            f"{' and '.join(unset)} not set: jobs whose task is gone are not found",
            " and ".join(f"set {value} ({variable})" for variable, value in lacks.items() if value),
        )
        return
    assert config.airflow_login is not None
    try:
        with AirflowApi.from_login(config.airflow_url, config.airflow_login) as api:
            health = api.get("/monitor/health")
            ill = [n for n, part in health.items() if part and part.get("status") not in ("healthy", None)]
            if ill:
                yield failed("Airflow", f"not healthy: {', '.join(sorted(ill))}", "see that component's log")
            else:
                yield ok("Airflow", f"{config.airflow_url} is healthy and knows our log-in")
            yield from _check_dag(api)
    except (AirflowApiError, ConfigError) as error:
        yield failed(
            "Airflow",
            str(error),
            "correct airflow.url (POLLUX_AIRFLOW_URL), and login.json in the Secret airflow.loginSecret (the "
            "file POLLUX_AIRFLOW_LOGIN)",
        )


def _check_dag(api: AirflowApi) -> Iterator[Finding]:
    dag = api.dag(SCHEDULE_DAG)
    if dag is None:
        yield failed(
            "scheduling DAG",
            f"Airflow has no DAG {SCHEDULE_DAG}",
            "put the project's dags/ into Airflow's DAGs folder (the chart's ConfigMap has them), and see "
            "Airflow's import errors",
        )
    elif dag.has_import_errors:
        errors = "; ".join(text.strip().splitlines()[-1] for text in api.import_errors().values())
        yield failed("scheduling DAG", f"it cannot be imported: {errors}", "correct that and wait a minute")
    elif dag.is_paused:
        yield failed("scheduling DAG", "it is paused", f"airflow dags unpause {SCHEDULE_DAG}")
    else:
        yield ok("scheduling DAG", f"{SCHEDULE_DAG} is there and not paused")


def check_mlflow(config: Settings, for_pods: str) -> Iterator[Finding]:
    """Whether it answers under its name here and under the one that pods use, and takes runs and files."""
    uri = config.mlflow_tracking_uri
    if not uri:
        yield failed(
            "MLflow", "MLFLOW_TRACKING_URI is not set", "set mlflow.trackingUri (MLFLOW_TRACKING_URI)"
        )
        return
    for name in dict.fromkeys((uri, for_pods)):
        if not name.startswith(("http://", "https://")):
            where = without_password(name)
            yield warning("MLflow", f"{where} is no server, so pods cannot report to it", "start one")
            continue
        finding = _answers(uri, name)
        yield finding
        if finding.status == "failed" and name == uri:
            return
    yield from _check_writing(config)


def _answers(uri: str, name: str) -> Finding:
    """Ask the server at ``uri`` as if it were called by ``name``."""
    host = urlsplit(name).netloc.rpartition("@")[2]
    where = without_password(name)
    try:
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            url = f"{uri.rstrip('/')}{_SEARCH}"
            answer = client.post(url, json={"max_results": 1}, headers={"Host": host})
    except (httpx.HTTPError, ValueError) as error:
        return failed(
            "MLflow", f"{without_password(uri)} does not answer: {error}", "start it, or correct the address"
        )
    if answer.status_code == 403 and "host" in answer.text.lower():
        return failed(
            "MLflow's allowed hosts",
            f"it refuses requests to {host}",
            f"mlflow server --allowed-hosts {host},... (MLFLOW_SERVER_ALLOWED_HOSTS)",
        )
    if answer.status_code in (401, 403):
        return failed(
            "MLflow",
            f"{where} refuses us: {answer.status_code}",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )
    if answer.is_error:
        return failed("MLflow", f"{where} answers {answer.status_code}", "see its log")
    return ok("MLflow", f"answers as {host}")


def _check_writing(config: Settings) -> Iterator[Finding]:
    """Make a run in the jobs' experiment, with a figure and a file, and delete it again."""
    connection = Connection(config.mlflow_tracking_uri)
    try:
        experiment_id = connection.experiment(config.experiment)
        with connection.calling() as client:
            run_id = client.create_run(experiment_id, tags={"pollux.doctor": "1"}).info.run_id
        try:
            with connection.calling() as client:
                client.log_metric(run_id, "doctor", 1.0)
                client.log_text(run_id, "written by pollux doctor", "doctor.txt")
        finally:
            with connection.calling() as client:
                client.set_terminated(run_id, status="KILLED")
                client.delete_run(run_id)
    except StoreError as error:
        yield failed(
            "MLflow's write access",
            str(error),
            f"grant EDIT on experiment {config.experiment!r}, or name another in POLLUX_EXPERIMENT; files "
            "need a server with --artifacts-destination",
        )
    else:
        yield ok("MLflow's write access", f"experiment {config.experiment!r} takes runs, figures and files")
