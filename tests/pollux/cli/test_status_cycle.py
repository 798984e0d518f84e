"""``pollux status`` and ``pollux cycle`` where something that they need is wrong or away."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli import app


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
