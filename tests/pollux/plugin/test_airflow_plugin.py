"""The routes behind Airflow's real log-in, mounted as Airflow mounts them."""

import json
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path

import jsonschema
import pytest
from fastapi.testclient import TestClient

from pollux.provider_info import get_provider_info

ROUTES = ["/pollux/", "/pollux/api/cluster", "/pollux/page.js", "/pollux/jobs/digits-0123456789/run"]


@pytest.fixture
def client(airflow_app: TestClient) -> TestClient:
    return airflow_app


@pytest.fixture
def token(client: TestClient) -> str:
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    return get_auth_manager().generate_jwt(SimpleAuthManagerUser(username="vera", role="viewer"))


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLLUX_STATE", str(tmp_path))


def test_no_route_answers_without_a_login(client: TestClient) -> None:
    for route in [*ROUTES, "/pollux/docs", "/pollux/openapi.json"]:
        response = client.get(route)
        assert response.status_code in (401, 404), route
        assert "digits" not in response.text
    assert [client.get(route).status_code for route in ROUTES] == [401] * len(ROUTES)


def test_a_wrong_token_is_refused(client: TestClient) -> None:
    headers = {"Authorization": "Bearer wrong"}
    assert {client.get(route, headers=headers).status_code for route in ROUTES} <= {401, 403}


def test_a_viewer_sees_the_page_also_while_the_cluster_is_away(client: TestClient, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    page = client.get("/pollux/", headers=headers)
    assert page.status_code == 200
    assert "does not answer" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/pollux/api/cluster", headers=headers).json()["jobs"] == []
    assert client.get("/pollux/page.js", headers=headers).status_code == 200
    assert client.get("/pollux/jobs/digits-0123456789/run", headers=headers).status_code == 503


def test_a_job_id_that_is_none_never_reaches_the_cluster(client: TestClient, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    assert client.get("/pollux/jobs/..%2Flease/run", headers=headers).status_code in (404, 422)
    assert client.get("/pollux/jobs/A%3Fb/run", headers=headers).status_code == 422


def test_without_settings_it_says_what_is_missing(
    client: TestClient, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POLLUX_STATE")
    response = client.get("/pollux/", headers={"Authorization": f"Bearer {token}"})
    assert response.status_code == 503
    assert "POLLUX_STATE" in response.text


def test_airflow_finds_plugin_and_provider_by_their_entry_points() -> None:
    (plugin,) = entry_points(group="airflow.plugins", name="pollux")
    assert plugin.load().name == "pollux"
    found = entry_points(group="apache_airflow_provider").select(module="pollux.provider_info")
    assert [point.load() for point in found] == [get_provider_info]


def test_provider_info_keeps_airflows_schema_and_names_what_exists() -> None:
    info = get_provider_info()
    schema = json.loads(resources.files("airflow").joinpath("provider_info.schema.json").read_text())
    jsonschema.validate(info, schema)
    from pollux.operators.links import MLflowRunLink

    assert info["extra-links"] == [f"{MLflowRunLink.__module__}.{MLflowRunLink.__qualname__}"]
