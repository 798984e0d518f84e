"""The metrics' route as Airflow serves it: a token of its own, and no other way in."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from pollux.record import Records, to_json
from pollux.snapshot import Decision, Node, Snapshot
from pollux_agent.protocol import encode

TOKEN = "0123456789abcdef" * 2
ROUTE = "/pollux/metrics"


@pytest.fixture
def client(airflow_app: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("POLLUX_STATE", str(tmp_path))
    monkeypatch.setenv("POLLUX_METRICS_TOKEN", str(tmp_path / "token"))
    return airflow_app


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def save_decision(state: Path, number: int, gpus: int) -> None:
    records = Records(state / "decisions")
    snapshot = Snapshot(
        decision=number,
        now_unix_s=1_700_000_000.0,
        interval_s=60.0,
        nodes=(Node(name="n", gpus=gpus),),
        jobs=(),
    )
    decision = Decision(decision=number, policy="pollux", objective=0.5, jobs={})
    records.save(number, "snapshot.json", encode(snapshot))
    records.save(number, "decision.json", encode(decision))
    records.save(
        number, "result.json", to_json({"actions": [], "left_out": {}, "wall_clock_s": {"act": 0.25}})
    )


def test_prometheus_reads_the_last_decision_with_its_token(client: TestClient, tmp_path: Path) -> None:
    save_decision(tmp_path, 9, gpus=3)
    save_decision(tmp_path, 10, gpus=4)
    response = client.get(ROUTE, headers=bearer(TOKEN))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert 'pollux_decision{deployment="airflow"} 10.0' in response.text
    assert 'pollux_gpus{deployment="airflow"} 4.0' in response.text
    assert 'pollux_cycle_seconds{deployment="airflow",step="act"} 0.25' in response.text


def test_open_metrics_is_spoken_where_it_is_asked_for(client: TestClient, tmp_path: Path) -> None:
    save_decision(tmp_path, 1, gpus=1)
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    response = client.get(ROUTE, headers=bearer(TOKEN) | accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_neither_nobody_nor_an_administrator_without_the_token_reads_them(client: TestClient) -> None:
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    login = get_auth_manager().generate_jwt(SimpleAuthManagerUser(username="root", role="admin"))
    for headers in ({}, bearer("wrong"), bearer(login)):
        response = client.get(ROUTE, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"


def test_the_token_opens_nothing_else(client: TestClient) -> None:
    for route in ("/pollux/", "/pollux/api/cluster", "/api/v2/dags"):
        assert client.get(route, headers=bearer(TOKEN)).status_code in (401, 403), route


def test_without_a_token_set_there_is_no_way_in(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLLUX_METRICS_TOKEN")
    assert client.get(ROUTE, headers=bearer("")).status_code == 401


def test_a_bad_token_file_is_told_in_the_log_alone(
    client: TestClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text("short")
    response = client.get(ROUTE, headers=bearer("short"))
    assert response.status_code == 503
    assert str(tmp_path) not in response.text
    assert "openssl rand" in caplog.text


def test_a_broken_record_is_no_figure(client: TestClient, tmp_path: Path) -> None:
    save_decision(tmp_path, 1, gpus=1)
    (tmp_path / "decisions" / "1" / "decision.json").write_text("{")
    assert client.get(ROUTE, headers=bearer(TOKEN)).status_code == 503
