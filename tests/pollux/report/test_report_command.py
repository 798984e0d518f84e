"""``pollux report``: a page with a figure, a table and a command for each section; it resumes."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner, Result

from pollux.bench.scale import Measured
from pollux.cli import app
from pollux.report.cases import command
from pollux.report.catalog import ORDER, QUICK_JOBS, sections
from pollux.report.documents import Documents
from pollux.report.studies import Rentals, Scaled, studies
from pollux.simulate.autoscale import Moment, Rental
from pollux.simulate.follow import Course
from pollux.simulate.kept import read_kept, simulate_and_keep
from pollux.simulate.reproduce import Case
from pollux.simulate.synthetic import synthetic_traces
from pollux_agent.protocol import encode, to_plain

WORKLOAD = "name,time,application,num_replicas,batch_size\na,0,bert,2,48\nb,100,deepspeech2,2,80\n"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(synthetic_traces(), tmp_path / "traces"))
    (folder / "workloads/synthetic/workload-1.csv").write_text(WORKLOAD)
    return folder


def text_of(out: Path) -> str:
    """The page without the marks that keep words of commands together."""
    return (out / "index.html").read_text().replace("<span>", "").replace("</span>", "")


def report(traces: Path, out: Path, *options: str) -> Result:
    command_line = ["report", "--traces", str(traces), "--out", str(out), "--jobs", "1", *options]
    return CliRunner().invoke(app, command_line)


def test_the_page_has_figures_tables_and_commands_and_simulations_are_kept(
    traces: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    options = ("--only", "policies", "--only", "time", "--only", "fairness", "--only", "counterexample")
    done = report(traces, out, *options)
    assert done.exit_code == 0, done.output
    page = text_of(out)
    for key in ("policies", "time", "fairness", "counterexample"):
        assert f'src="{key}.svg"' in page
        assert (out / f"{key}.svg").read_text().lstrip().startswith("<?xml")
    assert "pollux simulate --traces TRACES --workload synthetic/workload-1 --policy tiresias" in page
    assert "1.6860" in page and "unreachable" in page
    assert "<script" not in page and "http" not in page
    kept = {path: path.stat().st_mtime_ns for path in (out / "simulations").iterdir()}
    assert report(traces, out, *options).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_every_section_names_commands_that_simulate_knows(traces: Path) -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    parameters = group.commands["simulate"].params
    known = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts)}
    for quick in (False, True):
        shown = sections(traces, ["workload-1"], quick=quick)
        keys = {section.key for section in shown}
        assert keys >= {
            "policies",
            "interval",
            "interference",
            "fairness",
            "time",
            "restarts",
            "fits",
            "ablation",
        }
        assert keys >= {"one-type", "sia-p", "sia-interval", "restart-cost"}
        assert keys | {study.key for study in studies(traces, ["workload-1"], quick=quick)} <= set(ORDER)
        for case in (case for section in shown for case in section.cases):
            words = command(case).split()
            assert {word for word in words if word.startswith("--")} <= known
            assert "--cluster" in words
            assert case.data.startswith("synthetic/workload-1")


def test_simulations_of_one_name_are_the_same_and_others_have_other_names(traces: Path) -> None:
    cases = [case for section in sections(traces, ["workload-1"]) for case in section.cases]
    by_name = {case.name: command(case) for case in cases}
    assert all(by_name[case.name] == command(case) for case in cases)
    assert len(set(by_name.values())) == len(by_name)


def test_a_quick_report_takes_the_first_jobs_by_submission_and_says_so(traces: Path) -> None:
    (traces / "workloads/philly-1.0").mkdir()
    late = "\n".join(f"job-{number},{1000 - number},bert,1,12" for number in range(20))
    (traces / "workloads/philly-1.0/workload-1.csv").write_text(f"{WORKLOAD.splitlines()[0]}\n{late}\n")
    case = next(sections(traces, ["workload-1"], quick=True)[0].cases)
    requests = case.run(traces).workload.requests
    assert [request.name for request in requests] == [f"job-{19 - number}" for number in range(QUICK_JOBS)]
    assert case.data == f"philly-1.0/workload-1 (first {QUICK_JOBS} jobs)"
    assert command(case).endswith(f"--first {QUICK_JOBS}")
    assert next(sections(traces, ["workload-1"])[0].cases).data == "philly-1.0/workload-1"


def test_what_is_no_simulation_of_workloads_has_its_figure_and_command_too(
    traces: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    keys = ("restarts", "fits", "co-adaptation", "autoscaling", "counterexample")
    done = report(traces, out, "--quick", *(word for key in keys for word in ("--only", key)))
    assert done.exit_code == 0, done.output
    page = text_of(out)
    sections_of_page = page.split("<section ")[1:]
    assert len(sections_of_page) == len(keys)
    for text in sections_of_page:
        assert "Made by <code>pollux " in text and "Results from" in text
    assert "pollux autoscale --traces TRACES --application resnet18" in page
    kept = {path.name: path.read_text() for path in (out / "simulations").glob("study-*.json")}
    assert kept.keys() == {
        "study-autoscaling--resnet18--10-nodes.json",
        "study-co-adaptation--synthetic-workload-1.json",
    }
    for name in kept:
        (out / "simulations" / name).write_text("{}")
    again = report(traces, out, "--quick", *(word for key in keys for word in ("--only", key)))
    assert again.exit_code == 0, again.output
    assert all(f"{name}: is no study that was kept" in again.stderr.replace("\n", "") for name in kept)
    assert {name: (out / "simulations" / name).read_text() for name in kept} == kept
    assert text_of(out) == page


@pytest.mark.parametrize(
    "damage",
    [
        lambda result: result | {"timeline": {}},
        lambda result: result | {"timeline": None},
        lambda result: result | {"timeline": result["timeline"] | {"gpus": [1]}},
        lambda result: result | {"jobs": [result["jobs"][0] | {"completed_s": None}]},
        lambda result: result | {"jobs": [result["jobs"][0] | {"started_s": None}]},
    ],
)
def test_a_kept_simulation_that_no_figure_can_show_is_simulated_again(
    kept_simulation: Path, damage: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    whole = json.loads(kept_simulation.read_text())
    assert kept_simulation.stem in read_kept(kept_simulation.parent)
    other = kept_simulation.with_name("other--seed0.json")
    other.write_text(json.dumps(whole | {"result": damage(whole["result"])}))
    assert other.stem not in read_kept(kept_simulation.parent)


@pytest.fixture(scope="module")
def kept_simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    traces, folder = tmp_path_factory.mktemp("traces"), tmp_path_factory.mktemp("simulations")
    (traces / "apps").symlink_to(synthetic_traces() / "apps")
    (traces / "workloads/two").mkdir(parents=True)
    (traces / "workloads/two/workload-1.csv").write_text(WORKLOAD)
    case = Case(group="fifo", workload="two/workload-1", policy="fifo", options={}, cluster="small")
    simulate_and_keep(traces, [case], folder, processes=1, news=lambda run, done: None)
    return folder / f"{case.name}.json"


COURSE = Course(
    name="a",
    application="bert",
    time_s=(60.0, 120.0),
    gpus=(1, 2),
    batch_size=(12, 24),
    efficiency=(1.0, 0.9),
    active=(1, 1),
)
RENTAL = Rental(
    policy="goodput",
    application="bert",
    seconds=50.0,
    node_s=50.0,
    restarts=0,
    course=(Moment(time_s=60.0, nodes=1, batch_size=12, efficiency=1.0, progress=5.0),),
)
SCALED = Scaled(
    rows=(Measured(gpus=64, jobs=38, policy="sia", decide_s=0.1, lp_s=0.1, objective_ratio=None),)
)


def wrong_shapes(document: Mapping[str, object]) -> Iterator[object]:
    """What is no document, and the document with one value missing or of another kind."""
    yield from ([], {}, None, 5, "text", {"rows": []}, {"rentals": []})
    for key, value in document.items():
        yield {name: each for name, each in document.items() if name != key}
        wrong = [None, [], {"a": 1}, [None], [[1], [2]], -1, *([] if isinstance(value, str) else ["text"])]
        yield from (dict(document) | {key: each} for each in wrong)


@pytest.mark.parametrize("document", [COURSE, Rentals(rentals=(RENTAL, RENTAL)), SCALED])
def test_a_kept_study_of_any_other_shape_is_computed_again_and_said_to_be(
    tmp_path: Path, document: object
) -> None:
    told: list[str] = []
    kept, path = Documents(folder=tmp_path, warn=told.append), tmp_path / "study-x.json"
    whole = encode(document)
    wrong = [json.dumps(each) for each in wrong_shapes(to_plain(document))]
    for number, text in enumerate([*wrong, "", whole[:-1], whole.replace("1", "NaN"), "\0"], 1):
        path.write_text(text)
        assert kept.get("x", type(document), lambda: document) == document
        assert len(told) == number and str(path) in told[-1], text
        assert path.read_text() == whole + "\n"
    assert kept.get("x", type(document), lambda: pytest.fail("it is kept")) == document


def test_the_job_that_is_followed_is_of_the_workload_that_was_asked_for(traces: Path, tmp_path: Path) -> None:
    header, first, _ = WORKLOAD.splitlines()
    other = first.replace("a,0,bert,2,48", "other,0,resnet18,1,128")
    (traces / "workloads/synthetic/workload-2.csv").write_text(f"{header}\n{other}\n")
    for name, job in (("workload-1", "(a, bert)"), ("workload-2", "(other, resnet18)")):
        done = report(traces, tmp_path / "out", "--only", "co-adaptation", "--workload", name)
        assert done.exit_code == 0, done.output
        page = text_of(tmp_path / "out")
        assert f"The job that used most GPU time {job}" in page and f"synthetic/{name}" in page


def test_a_folder_of_other_traces_is_refused(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert report(traces, out, "--only", "counterexample").exit_code == 0
    other = Path(shutil.copytree(traces, tmp_path / "other"))
    (other / "workloads/synthetic/workload-1.csv").write_text(WORKLOAD.replace(",100,", ",200,"))
    done = report(other, out, "--only", "counterexample")
    assert done.exit_code == 2
    assert "name another folder" in done.output and str(traces) in done.output.replace("\n", "")


def test_without_workloads_there_is_nothing_to_show(traces: Path, tmp_path: Path) -> None:
    done = report(traces, tmp_path / "out", "--workload", "workload-99")
    assert done.exit_code == 2
    assert "nothing to show" in done.output
