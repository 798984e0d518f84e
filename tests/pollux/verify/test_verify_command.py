"""The ``pollux verify`` command: its table, its JSON and its exit codes."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import state_builder as build
from typer.testing import CliRunner

from pollux.cli import app
from pollux.stack.processes import process_info
from pollux.stack.record import StackPlan, StackRecord, write_record


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("pollux.policy.decide", build.equal_split, raising=False)
    return build.write_good_state(tmp_path / "state")


def test_a_good_run_ends_with_0_and_a_table(state: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(state)])
    assert result.exit_code == 0, result.output
    assert "checks passed" in result.output


def test_json_names_every_check(state: Path) -> None:
    (state / "airflow-export.json").unlink()
    result = CliRunner().invoke(app, ["verify", str(state), "--json"])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"]) == (1, False)
    assert [check["name"] for check in answer["checks"] if not check["ok"]] == ["tasks"]


def test_another_folder_ends_with_2_and_the_fix(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 2
    assert "jobs/" in result.stderr


def test_a_stack_that_runs_is_warned_about(state: Path) -> None:
    info = process_info(os.getpid())
    assert info is not None
    record = StackRecord(
        phase="ready",
        plan=StackPlan(state=state),
        mark="m",
        airflow_port=8080,
        execution_port=9090,
        mlflow_port=5000,
        login=state / "login.json",
        supervisor=info.process,
    )
    write_record(record)
    assert "stop it first" in CliRunner().invoke(app, ["verify", str(state)]).stderr
    write_record(replace(record, phase="stopped"))
    assert CliRunner().invoke(app, ["verify", str(state)]).stderr == ""
