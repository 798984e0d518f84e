"""``pollux simulate`` and ``pollux bench reproduce``: results, same bytes, resuming, and clear refusals."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pollux.cli.simulate import app
from pollux.simulate.synthetic import synthetic_traces

WORKLOAD = "name,time,application,num_replicas,batch_size\na,0,bert,2,48\nb,100,deepspeech2,2,80\n"


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "set" / "workload-6.csv"
    path.parent.mkdir()
    path.write_text(WORKLOAD)
    return path


def simulate(*options: object) -> Result:
    return CliRunner().invoke(app, ["simulate", "--nodes", "2", *map(str, options)])


def test_results_hold_every_figure_and_the_same_seed_gives_the_same_bytes(
    workload: Path, tmp_path: Path
) -> None:
    texts = []
    for turn in range(2):
        out = tmp_path / f"{turn}" / "results.json"
        out.parent.mkdir()
        done = simulate("--workload", workload, "--policy", "default", "--out", out, "--json")
        assert done.exit_code == 0, done.output
        texts.append(out.read_bytes())
        assert json.loads((out.parent / "timings.json").read_text())["workloads"][0]["wall_s"] >= 0
    assert texts[0] == texts[1]
    results = json.loads(texts[0])
    (entry,) = results["workloads"]
    assert (entry["name"], entry["set"]) == ("workload-6", "set")
    assert results["mean"]["avg_jct_s"] == entry["avg_jct_s"]
    assert {"p99_jct_s", "makespan_s", "restarts_per_job", "gpu_hours_per_job", "ftf"} <= set(entry)
    assert [job["submitted_s"] for job in entry["jobs"]] == [0.0, 100.0]
    assert entry["makespan_s"] == max(job["completed_s"] for job in entry["jobs"])
    lengths = {len(column) for column in entry["timeline"].values()}
    assert len(lengths) == 1
    assert json.loads(done.stdout) == results["mean"]


def test_several_workloads_run_in_processes_of_their_own_with_pictures(
    workload: Path, tmp_path: Path
) -> None:
    other = workload.with_name("workload-7.csv")
    shutil.copy(workload, other)
    out = tmp_path / "results.json"
    options = ["--policy", "fifo", "--jobs", "2", "--out", out, "--plot", tmp_path / "plots"]
    done = simulate("--workload", workload, "--workload", other, *options)
    assert done.exit_code == 0, done.output
    entries = json.loads(out.read_text())["workloads"]
    assert [entry["name"] for entry in entries] == ["workload-6", "workload-7"]
    assert entries[0]["jobs"] == entries[1]["jobs"]
    assert (tmp_path / "plots" / "set-workload-6.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workload", "nothing.csv"], ["nothing.csv", "no such file"]),
        (["--policy", "best"], ["--policy", "'best' is no policy", "tiresias"]),
        (["--interval", "0"], ["interval_s"]),
        (["--interference", "1.5"], ["interference"]),
        (["--cluster", "nowhere.json"], ["nowhere.json", "sia"]),
        (["--gpus-per-node", "10"], ["--gpus-per-node 10"]),
        (["--traces", "nowhere"], ["application 'bert' is unknown"]),
    ],
)
def test_bad_options_end_with_2_and_a_fix(workload: Path, options: list[str], words: list[str]) -> None:
    done = simulate("--workload", workload, *options)
    assert done.exit_code == 2
    for word in words:
        assert word in done.output


def test_an_output_that_cannot_be_written_is_told(workload: Path, tmp_path: Path) -> None:
    done = simulate(
        "--workload", workload, "--policy", "fifo", "--out", tmp_path / "nowhere" / "results.json"
    )
    assert done.exit_code == 2
    assert "name a folder that exists" in done.output


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A trace folder with published results for one small workload."""
    traces = Path(shutil.copytree(synthetic_traces(), tmp_path / "traces"))
    for load in ("0.5", "1.0", "1.5", "2.0"):
        folder = traces / "workloads" / f"philly-{load}"
        folder.mkdir()
        (folder / "workload-1.csv").write_text(WORKLOAD)
    loads = {load: {"workload-1": 1000.0} for load in ("0.5", "1.0", "1.5", "2.0")}
    reference = {
        "load": dict.fromkeys(("pollux", "tiresias", "optimus"), loads),
        "interval": {key: {"workload-1": 1000.0} for key in ("30s", "2m", "4m", "8m")},
        "interference": {key: {"workload-1": 1000.0} for key in ("noavoid", "inter25", "inter50")},
    }
    (traces / "reference-results.json").write_text(json.dumps(reference))
    return traces


def test_reproduce_goes_on_where_it_stopped(published: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = ["bench", "reproduce", "--traces", str(published), "--state", str(state), "--jobs", "1"]
    first = CliRunner().invoke(app, [*command, "--only", "tiresias load 1.0", "--json"])
    assert first.exit_code == 1, "a made-up published result is not met"
    (verdict,) = json.loads(first.stdout)
    assert (verdict["done"], verdict["cases"], verdict["met"]) == (1, 1, False)
    kept = {path: path.stat().st_mtime_ns for path in state.iterdir()}
    refused = CliRunner().invoke(app, [*command, "--only", "tiresias"])
    assert refused.exit_code == 2 and "--resume" in refused.output
    resumed = CliRunner().invoke(app, [*command, "--only", "tiresias", "--resume", "--json"])
    assert [verdict["done"] for verdict in json.loads(resumed.stdout)] == [1, 1, 1, 1]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list(state.iterdir())) == 4


def test_reproduce_needs_the_published_results(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "reproduce", "--traces", str(tmp_path)])
    assert done.exit_code == 2
    assert "reference-results.json" in done.output
