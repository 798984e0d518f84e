"""The demo deletes only what a demo made."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pollux.demo.folder import MARKER, fresh_folder
from pollux.demo.jobs import quick_plan
from pollux.demo.run import Outputs, run_demo
from pollux.errors import ConfigError
from pollux.stack.processes import process_info
from pollux.stack.record import StackPlan, StackRecord, read_record, write_record


def made(path: Path) -> Path:
    """The folder as a demo leaves it that is over."""
    with fresh_folder(path) as folder:
        return folder


def test_a_new_folder_is_made_and_a_former_demo_replaced(tmp_path: Path) -> None:
    folder = made(tmp_path / "a" / "demo")
    (folder / "old").touch()
    (folder / "jobs").mkdir()
    (folder / "link").symlink_to(tmp_path)
    assert made(folder) == folder
    assert {entry.name for entry in folder.iterdir()} == {MARKER}


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    assert made(tmp_path) == tmp_path


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="--state"):
        made(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_in_which_a_demo_is_at_work_is_left_alone_also_before_its_stack_runs(tmp_path: Path) -> None:
    with fresh_folder(tmp_path / "demo") as folder:
        (folder / "expectations.json").touch()
        with pytest.raises(ConfigError, match="another demo is at work"):
            made(folder)
        assert (folder / "expectations.json").exists()
    assert made(folder) == folder


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--state: .*file/demo cannot be made"):
        made(tmp_path / "file" / "demo")


def test_a_folder_in_which_a_stack_runs_is_left_alone(tmp_path: Path) -> None:
    folder = made(tmp_path / "demo")
    info = process_info(os.getpid())
    assert info is not None
    running = StackRecord(
        phase="ready",
        plan=StackPlan(state=folder),
        mark="m",
        airflow_port=8080,
        execution_port=9090,
        mlflow_port=5000,
        login=folder / "login.json",
        supervisor=info.process,
    )
    write_record(running)
    with pytest.raises(ConfigError, match="pollux stack down --state"):
        made(folder)
    write_record(replace(running, supervisor=replace(info.process, started_ticks=1)))
    assert made(folder) == folder
    assert read_record(folder) is None


def test_a_file_and_a_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(made(tmp_path / "demo"))
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="is no folder"):
            made(tmp_path / name)


@pytest.mark.parametrize(
    ("summary", "picture", "option"),
    [
        ("nowhere/summary.json", "picture.png", "--summary"),
        (".", "picture.png", "--summary"),
        ("summary.json", "nowhere/picture.png", "--picture"),
        ("summary.json", "picture.txt", "--picture"),
    ],
)
def test_an_output_that_could_not_be_written_is_refused_before_the_demo_begins(
    tmp_path: Path, summary: str, picture: str, option: str
) -> None:
    outputs = Outputs(summary=tmp_path / summary, picture=tmp_path / picture)
    with pytest.raises(ConfigError, match=f"^{option}: "):
        run_demo(quick_plan(), state=tmp_path / "state", outputs=outputs, console=Console(quiet=True))
    assert not (tmp_path / "state").exists()
