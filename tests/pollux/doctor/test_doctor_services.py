"""The doctor and a real MLflow server, and what it says where a service is away or not set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow_server import mlflow_server

from pollux.doctor.finding import Finding
from pollux.doctor.services import check_airflow, check_mlflow
from pollux.doctor.versions import check_mlflow_version, check_packages
from pollux.settings import Settings


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as url:
        yield url


def look(config: Settings, for_pods: str = "") -> list[Finding]:
    return list(check_mlflow(config, for_pods or config.mlflow_tracking_uri))


def test_a_server_that_works_is_ok_and_nothing_of_the_try_is_left(mlflow: str, tmp_path: Path) -> None:
    config = Settings(state=tmp_path, mlflow_tracking_uri=mlflow, experiment="doctored")
    findings = look(config)
    assert [finding.status for finding in findings] == ["ok", "ok"], findings
    client = MlflowClient(mlflow)
    experiment = client.get_experiment_by_name("doctored")
    assert client.search_runs([experiment.experiment_id]) == []


def test_a_name_that_only_pods_use_has_to_be_allowed(mlflow: str, tmp_path: Path) -> None:
    config = Settings(state=tmp_path, mlflow_tracking_uri=mlflow)
    refused = [f for f in look(config, "http://mlflow.team.svc:5000") if f.status == "failed"]
    assert [finding.check for finding in refused] == ["MLflow's allowed hosts"]
    assert "--allowed-hosts mlflow.team.svc:5000" in refused[0].fix


def test_a_server_that_is_told_that_name_takes_it(tmp_path: Path) -> None:
    allowed = "--allowed-hosts=mlflow.team.svc:5000,127.0.0.1:*"
    with mlflow_server(tmp_path, allowed) as url:
        config = Settings(state=tmp_path, mlflow_tracking_uri=url)
        assert {finding.status for finding in look(config, "http://mlflow.team.svc:5000")} == {"ok"}


def test_a_deleted_experiment_is_named(mlflow: str, tmp_path: Path) -> None:
    client = MlflowClient(mlflow)
    client.delete_experiment(client.create_experiment("gone"))
    findings = look(Settings(state=tmp_path, mlflow_tracking_uri=mlflow, experiment="gone"))
    assert findings[-1].status == "failed"
    assert "'gone' is deleted" in findings[-1].detail


def test_versions_and_clock_of_the_server(mlflow: str, tmp_path: Path) -> None:
    findings = list(check_mlflow_version(Settings(state=tmp_path, mlflow_tracking_uri=mlflow)))
    assert [(finding.check, finding.status) for finding in findings] == [("versions", "ok"), ("clocks", "ok")]


def test_a_server_that_is_away_fails_once(tmp_path: Path) -> None:
    findings = look(Settings(state=tmp_path, mlflow_tracking_uri="http://127.0.0.1:1"))
    assert [(finding.check, finding.status) for finding in findings] == [("MLflow", "failed")]


def test_an_address_with_a_password_is_shown_without(tmp_path: Path) -> None:
    findings = look(Settings(state=tmp_path, mlflow_tracking_uri="http://user:secret@127.0.0.1:1"))
    assert "secret" not in "".join(finding.detail + finding.fix for finding in findings)


def test_what_is_not_set_is_named_with_the_value_to_set(tmp_path: Path) -> None:
    (mlflow,) = look(Settings(state=tmp_path))
    assert (mlflow.status, "MLFLOW_TRACKING_URI" in mlflow.fix) == ("failed", True)


@pytest.mark.parametrize(
    ("given", "lacks", "has"),
    [
        pytest.param({}, ["airflow.url", "airflow.loginSecret"], [], id="neither"),
        pytest.param({"airflow_url": "http://a"}, ["airflow.loginSecret"], ["airflow.url"], id="no log-in"),
        pytest.param({"airflow_login": "/l"}, ["airflow.url"], ["airflow.loginSecret"], id="no address"),
    ],
)
def test_what_is_missing_for_airflow_is_named_and_what_is_there_is_not(
    given: dict[str, Any], lacks: list[str], has: list[str], tmp_path: Path
) -> None:
    (found,) = check_airflow(Settings(state=tmp_path, **given))
    assert found.status == "warning"
    assert all(name in found.fix for name in lacks)
    assert not any(name in found.fix for name in has)


def test_a_log_in_that_only_airflows_pods_have_is_not_said_to_be_unset(tmp_path: Path) -> None:
    config = Settings(state=tmp_path, airflow_url="http://airflow")
    (found,) = check_airflow(config, login_elsewhere=True)
    assert "not set" not in found.detail
    assert "POLLUX_AIRFLOW_LOGIN=" in found.fix


def test_airflow_that_is_away_fails(tmp_path: Path) -> None:
    login = tmp_path / "login.json"
    login.write_text('{"admin": "secret"}')
    config = Settings(state=tmp_path, airflow_url="http://127.0.0.1:1", airflow_login=tmp_path / "no.json")
    assert [finding.status for finding in check_airflow(config)] == ["failed"]


def test_both_packages_here_are_of_one_version() -> None:
    assert [finding.status for finding in check_packages()] == ["ok"]
