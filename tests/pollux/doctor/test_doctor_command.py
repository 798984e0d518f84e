"""The command: exit codes, JSON, and options that make no sense."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli import app


def run(*arguments: str, state: Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["doctor", "--state", str(state), *arguments])
    return found.exit_code, found.output


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "POLLUX_STATE", "POLLUX_CLUSTER", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_it_ends_with_1_and_says_what_to_do_where_something_is_missing(tmp_path: Path) -> None:
    code, output = run(state=tmp_path)
    assert code == 1
    assert "failed  MLflow: MLFLOW_TRACKING_URI is not set" in output
    assert f"pollux stack up --state {tmp_path}" in output


def test_json_holds_every_finding(tmp_path: Path) -> None:
    code, output = run("--json", state=tmp_path)
    found = json.loads(output)
    assert (code, found["ok"]) == (1, False)
    assert sum(found["counts"].values()) == len(found["findings"])
    assert all(set(finding) == {"check", "status", "detail", "fix"} for finding in found["findings"])
    assert all(finding["fix"] for finding in found["findings"] if finding["status"] == "failed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("--cluster", "slurm"), "cluster", id="another kind of cluster"),
        pytest.param(("--cluster", "kubernetes", "--role", "king"), "king", id="no role"),
        pytest.param(("--cluster", "kubernetes", "--account", "me"), "NAMESPACE/NAME", id="no account"),
        pytest.param(("--cluster", "kubernetes", "--namespace", "Nope"), "Nope", id="no name of a namespace"),
        pytest.param(("--cluster", "kubernetes", "--pod", "/nowhere.yaml"), "nowhere", id="no file"),
    ],
)
def test_bad_options_end_with_2(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, output = run(*arguments, state=tmp_path)
    assert code == 2
    assert said in output


def test_no_way_to_a_cluster_is_a_finding_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_KUBE_CONFIG", str(tmp_path / "none"))
    code, output = run("--cluster", "kubernetes", state=tmp_path)
    assert code == 1
    assert "Kubernetes" in output
    assert "Traceback" not in output
