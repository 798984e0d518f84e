"""Where the doctor looks: in all namespaces of jobs, as the account that each part has."""

import json
from typing import Any

import pytest
from fake_kube import FakeKube
from typer.testing import CliRunner

from pollux.cli import app
from pollux.doctor.access import check_places, check_rights
from pollux.doctor.release import read_release
from pollux.doctor.rights import ROLES
from pollux_agent.driver.kube import api as kube_api
from pollux_agent.driver.kube.api import KubeError

PLACES = {"cluster": ("",), "jobs": ("team-a", "team-b"), "lease": ("airflow",)}
SETTINGS = {
    "POLLUX_CLUSTER": "kubernetes",
    "POLLUX_STATE": "/pollux/state",
    "POLLUX_KUBE_NAMESPACE": "team-a",
    "POLLUX_KUBE_NAMESPACES": '["team-a", "team-b"]',
    "POLLUX_KUBE_LEASE_NAMESPACE": "airflow",
    "POLLUX_KUBE_DRIVER_SERVICE_ACCOUNT": "drivers",
    "POLLUX_AIRFLOW_LOGIN": "/pollux/airflow/login.json",
}


def release() -> tuple[str, dict[str, Any]]:
    meta = {
        "name": "pollux-settings",
        "namespace": "airflow",
        "labels": {"app.kubernetes.io/instance": "pollux"},
    }
    return "/api/v1/configmaps", {"metadata": meta, "data": SETTINGS}


def namespaces(*names: str) -> list[tuple[str, dict[str, Any]]]:
    return [("/api/v1/namespaces", {"metadata": {"name": name}}) for name in names]


def accounts(name: str, *spaces: str) -> list[tuple[str, dict[str, Any]]]:
    return [("/api/v1/serviceaccounts", {"metadata": {"name": name, "namespace": space}}) for space in spaces]


def doctor(api: FakeKube, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, str]]:
    """What the command finds with that API server, outside of the cluster."""
    monkeypatch.setattr(kube_api, "open_api", lambda *_: api)
    monkeypatch.setattr("pollux.doctor.open_api", lambda *_: api)
    for name in [*SETTINGS, "MLFLOW_TRACKING_URI"]:
        monkeypatch.delenv(name, raising=False)
    found = CliRunner().invoke(app, ["doctor", "--json", "--release", "airflow/pollux", *arguments])
    return list(json.loads(found.output)["findings"])


def test_all_namespaces_of_a_release_are_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The second one's rights are missing."""
    monkeypatch.chdir(tmp_path)
    api = FakeKube(
        release(),
        *namespaces("team-a", "team-b", "airflow"),
        *accounts("drivers", "team-a", "team-b"),
        allows=lambda spec: spec["resourceAttributes"]["namespace"] != "team-b",
    )
    found = doctor(api, monkeypatch)
    (rights,) = (finding for finding in found if finding["check"].startswith("rights"))
    assert rights["status"] == "failed"
    assert "patch pods in namespace team-b" in rights["detail"]
    assert {f["detail"].partition(":")[0] for f in found if f["check"] == "quota"} == {"team-a", "team-b"}


def test_namespaces_and_accounts_that_are_not_there_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    api = FakeKube(release(), *namespaces("team-a"), *accounts("drivers", "team-a"))
    found = doctor(api, monkeypatch, "--account", "airflow/nobody")
    missing = {f["detail"]: f["fix"] for f in found if f["check"] in ("namespaces", "accounts")}
    assert set(missing) == {
        "there is no namespace team-b",
        "there is no namespace airflow",
        "namespace team-b has no ServiceAccount drivers",
        "namespace airflow has no ServiceAccount nobody",
    }
    assert missing["there is no namespace team-b"].startswith("kubectl create namespace team-b")
    assert "--account" in missing["namespace airflow has no ServiceAccount nobody"]
    only = doctor(api, monkeypatch, "--namespace", "nope")
    assert "there is no namespace nope" in [f["detail"] for f in only]


def test_who_may_not_look_namespaces_up_is_told_nothing_of_them() -> None:
    api = FakeKube()

    def refuse(method: str, path: str) -> None:
        raise KubeError(f"GET {path}: forbidden", 403, "Forbidden")

    api.before = refuse
    assert list(check_places(api, {"team-a": "namespaces"}, {"team-a/driver": "driver"})) == []


@pytest.mark.parametrize(("account", "user"), [("drivers", "drivers"), ("", "default")])
def test_a_drivers_rights_are_those_of_the_drivers_account_in_each_namespace(account: str, user: str) -> None:
    """Whoever else is asked about."""
    asked: set[tuple[str, str]] = set()

    def allows(spec: Any) -> bool:
        asked.add((spec["resourceAttributes"]["namespace"], spec["user"]))
        return bool(spec["user"].endswith(f"team-a:{user}"))

    api = FakeKube(allows=allows)
    found = list(check_rights(api, ["driver"], PLACES, "airflow/airflow-worker", account))  # type: ignore[arg-type]
    assert asked == {(space, f"system:serviceaccount:{space}:{user}") for space in ("team-a", "team-b")}
    assert [finding.status for finding in found] == ["ok", "failed"]
    assert f"team-b/{user} may not" in found[1].detail
    assert f"bound to team-b/{user}" in found[1].fix


def test_other_roles_are_asked_about_as_the_account_that_is_named() -> None:
    users: set[str] = set()
    api = FakeKube(allows=lambda spec: not users.add(spec["user"]))
    roles = [role for role in ROLES if role != "driver"]
    list(check_rights(api, roles, PLACES, "airflow/airflow-worker", "drivers"))  # type: ignore[arg-type]
    assert users == {"system:serviceaccount:airflow:airflow-worker"}


def test_a_releases_paths_are_told_apart() -> None:
    found = read_release(FakeKube(release()), "airflow/pollux")
    assert found.inside == {"POLLUX_STATE", "POLLUX_AIRFLOW_LOGIN"}
    assert not found.inside & found.settings.keys()
