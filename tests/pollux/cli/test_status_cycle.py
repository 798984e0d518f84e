"""``pollux status`` and ``pollux cycle`` where something that they need is wrong or away."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli import app
from pollux.cli import stack as stack_command
from pollux.stack.processes import ProcessId
from pollux.stack.record import StackPlan, StackRecord, read_record, write_record


def run(*arguments: str, **environ: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env=environ)
    return result.exit_code, result.output


@pytest.mark.parametrize("command", ["status", "cycle"])
def test_a_cluster_that_does_not_answer_is_named(command: str, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    code, output = run(command, "--state", str(tmp_path), MLFLOW_TRACKING_URI=uri)
    assert code == 1
    assert "does not answer" in output
    assert "local.sock" in output


@pytest.mark.parametrize("command", ["status", "cycle"])
def test_a_wrong_setting_is_named_with_its_value(command: str, tmp_path: Path) -> None:
    code, output = run(command, "--state", str(tmp_path), POLLUX_INTERVAL_S="soon")
    assert code == 2
    assert "interval_s" in output
    assert "soon" in output


def test_a_cycle_without_an_mlflow_server_to_ask_is_bad_usage(tmp_path: Path) -> None:
    code, output = run("cycle", "--state", str(tmp_path), MLFLOW_TRACKING_URI="")
    assert code == 2
    assert "MLFLOW_TRACKING_URI" in output


def test_watch_and_json_exclude_each_other(tmp_path: Path) -> None:
    code, output = run("status", "--state", str(tmp_path), "--watch", "--json")
    assert code == 2
    assert "--watch" in output


@pytest.fixture
def on_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of a stack that was started for Kubernetes, by variables of the environment."""

    def up(plan: StackPlan, **_: object) -> StackRecord:
        record = StackRecord(
            phase="ready",
            plan=plan,
            mark="0123",
            airflow_port=18080,
            execution_port=9090,
            mlflow_port=15000,
            login=plan.state / "login.json",
            supervisor=ProcessId(pid=77, started_ticks=12),
        )
        write_record(record)
        return record

    monkeypatch.setattr("pollux.stack.control.up", up)
    monkeypatch.setattr(stack_command, "_show", lambda *_, **__: None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    code, output = run(
        *("stack", "up", "--state", str(tmp_path), "--detach"),
        POLLUX_CLUSTER="kubernetes",
        POLLUX_POLICY="fifo",
        POLLUX_SEED="",
        POLLUX_KUBE_NAMESPACE="team",
        POLLUX_KUBE_CONFIG="no-kubeconfig",
        POLLUX_KUBE_DRIVER_ENV='{"TOKEN": "secret"}',
        POLLUX_INTERVAL_S="7",
    )
    assert code == 0, output
    return tmp_path


@pytest.mark.parametrize("command", ["status", "cycle"])
def test_a_stacks_own_cluster_is_the_one_that_is_asked(command: str, on_kubernetes: Path) -> None:
    code, output = run(command, "--state", str(on_kubernetes))
    assert code == 1
    assert f"no way to a cluster in {on_kubernetes / 'no-kubeconfig'}" in output


def test_the_doctor_looks_at_the_stacks_own_services_and_cluster(on_kubernetes: Path) -> None:
    code, output = run("doctor", "--state", str(on_kubernetes))
    assert code == 1
    assert f"no way to a cluster in {on_kubernetes / 'no-kubeconfig'}" in output
    assert "http://127.0.0.1:15000 does not answer" in output
    assert f"log-in file {on_kubernetes / 'login.json'}" in output


def test_the_environment_of_a_command_wins(on_kubernetes: Path) -> None:
    code, output = run("status", "--state", str(on_kubernetes), POLLUX_CLUSTER="local")
    assert code == 1
    assert "local.sock" in output


def test_a_stack_keeps_what_it_was_started_with_but_for_what_may_be_secret(on_kubernetes: Path) -> None:
    record = read_record(on_kubernetes)
    assert record is not None
    assert record.plan.settings == {
        "POLLUX_CLUSTER": "kubernetes",
        "POLLUX_POLICY": "fifo",
        "POLLUX_KUBE_NAMESPACE": "team",
        "POLLUX_KUBE_CONFIG": str(on_kubernetes / "no-kubeconfig"),
    }
    assert not record.plan.has_local_cluster
