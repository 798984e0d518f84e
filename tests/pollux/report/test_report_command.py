"""``pollux report``: a page with a figure, a table and a command for each section; it resumes."""

import shutil
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner, Result

from pollux.cli import app
from pollux.report.sections import command, sections
from pollux.simulate.synthetic import synthetic_traces

WORKLOAD = "name,time,application,num_replicas,batch_size\na,0,bert,2,48\nb,100,deepspeech2,2,80\n"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(synthetic_traces(), tmp_path / "traces"))
    (folder / "workloads/synthetic/workload-1.csv").write_text(WORKLOAD)
    return folder


def report(traces: Path, out: Path, *options: str) -> Result:
    command_line = ["report", "--traces", str(traces), "--out", str(out), "--jobs", "1", *options]
    return CliRunner().invoke(app, command_line)


def test_the_page_has_figures_tables_and_commands_and_simulations_are_kept(
    traces: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    options = ("--only", "policies", "--only", "time", "--only", "fairness")
    done = report(traces, out, *options)
    assert done.exit_code == 0, done.output
    page = (out / "index.html").read_text()
    for key in ("policies", "time", "fairness", "counterexample"):
        assert f'src="{key}.svg"' in page
        assert (out / f"{key}.svg").read_text().lstrip().startswith("<?xml")
    assert "pollux simulate --traces TRACES --workload synthetic/workload-1 --policy tiresias" in page
    assert "1.6860" in page and "unreachable" in page
    assert "<script" not in page and "http" not in page
    kept = {path: path.stat().st_mtime_ns for path in (out / "simulations").iterdir()}
    assert report(traces, out, *options).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_every_section_names_a_command_that_simulate_knows(traces: Path) -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    parameters = group.commands["simulate"].params
    known = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts)}
    shown = sections(traces, ["workload-1"])
    assert {section.key for section in shown} == {
        "policies",
        "interval",
        "interference",
        "fairness",
        "fits",
        "time",
    }
    for case in (case for section in shown for case in section.cases):
        assert {word for word in command(case).split() if word.startswith("--")} <= known


def test_without_workloads_there_is_nothing_to_show(traces: Path, tmp_path: Path) -> None:
    done = report(traces, tmp_path / "out", "--workload", "workload-99")
    assert done.exit_code == 2
    assert "nothing to show" in done.output
