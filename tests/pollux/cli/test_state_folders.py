"""Every command that is given a state folder which is none says so, with status 2 and no traceback."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli import app

TOP = Path(__file__).parents[3]

COMMANDS = {
    "stack up": ("stack", "up", "--detach", "--state"),
    "stack down": ("stack", "down", "--state"),
    "stack status": ("stack", "status", "--state"),
    "status": ("status", "--state"),
    "cycle": ("cycle", "--state"),
    "demo": ("demo", "--state"),
    "local serve": ("local", "serve", "--state"),
    "verify": ("verify",),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_path_under_a_file_is_bad_input(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, [*command, str(tmp_path / "file" / "state")])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 2
    assert str(tmp_path / "file") in result.output


@pytest.mark.parametrize("command", ["stack up", "stack down", "stack status", "status", "cycle"])
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, command: str) -> None:
    (tmp_path / "stack.json").mkdir()
    result = CliRunner().invoke(app, [*COMMANDS[command], str(tmp_path)])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 2
    assert "--state" in result.output
    assert "stack.json" in result.output


def test_a_path_that_is_no_text_is_refused(tmp_path: Path) -> None:
    state = tmp_path / os.fsdecode(b"\xff")
    pollux = str(Path(sys.executable).with_name("pollux"))
    command = [pollux, "stack", "up", "--detach", "--state", os.fsencode(state)]
    run = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert run.returncode == 2
    assert b"is no UTF-8" in run.stderr
    assert not state.exists()


@pytest.mark.parametrize("interval", ["0.5", "1e300"])
def test_an_interval_that_airflow_cannot_keep_is_refused(tmp_path: Path, interval: str) -> None:
    result = CliRunner().invoke(
        app, ["stack", "up", "--detach", "--state", str(tmp_path / "state"), "--interval", interval]
    )
    assert result.exit_code == 2
    assert "interval_s" in result.output
    assert not (tmp_path / "state").exists()


def test_a_spec_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["local", "submit", str(tmp_path)])
    assert result.exit_code == 2
    assert str(tmp_path) in result.output


def test_make_clean_removes_what_the_stack_and_the_demo_made_and_nothing_else_of_that_name() -> None:
    printed = subprocess.run(
        ["make", "-n", "clean", "STATE=/home/a b"], cwd=TOP, capture_output=True, text=True, check=True
    )
    removed = [shlex.split(line)[2:] for line in printed.stdout.splitlines() if line.startswith("rm -rf")]
    assert removed[0] == ["/home/a b/stack", "/home/a b/demo", "/home/a b/demo-kube"]
