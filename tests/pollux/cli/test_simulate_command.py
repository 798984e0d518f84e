"""``pollux simulate`` and ``pollux bench reproduce``: results, same bytes, resuming, and clear refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from pollux.cli.simulate import app
from pollux.simulate import files, runner
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
    assert results["mean"]["unfinished"] == 0


def test_several_workloads_run_in_processes_of_their_own_with_pictures(
    workload: Path, tmp_path: Path
) -> None:
    other = workload.with_name("workload-7.csv")
    shutil.copy(workload, other)
    out, alone = tmp_path / "results.json", tmp_path / "alone.json"
    options = ["--workload", workload, "--workload", other, "--policy", "pollux"]
    done = simulate(*options, "--jobs", "2", "--out", out, "--plot", tmp_path / "plots")
    assert done.exit_code == 0, done.output
    assert simulate(*options, "--jobs", "1", "--out", alone).exit_code == 0
    assert out.read_bytes() == alone.read_bytes(), "one process after the other gives the same"
    entries = json.loads(out.read_text())["workloads"]
    assert [entry["name"] for entry in entries] == ["workload-6", "workload-7"]
    assert entries[0]["jobs"] == entries[1]["jobs"]
    assert (tmp_path / "plots" / "set-workload-6.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workload", "nothing.csv"], ["nothing.csv", "no such file"]),
        (["--policy", "best"], ["--policy", "'best' is no policy", "tiresias"]),
        (["--interval", "0.5"], ["--interval (interval_s)", "greater than or equal to 1", "got 0.5"]),
        (["--interval", "nan"], ["--interval (interval_s)", "finite number"]),
        (["--interference", "1.5"], ["--interference (interference)", "less than 1"]),
        (["--restart-s", "-1"], ["--restart-s (restart_s)"]),
        (["--p", "inf"], ["--p (policy.fairness_p)"]),
        (["--p", "-1e9"], ["--p (policy.fairness_p)", "-1000"]),
        (["--seed", str(2**60)], ["--seed (policy.seed)"]),
        (["--cluster", ""], ["sia"]),
        (["--cluster", "nowhere.json"], ["nowhere.json", "sia"]),
        (["--gpus-per-node", "10"], ["--gpus-per-node 10"]),
        (["--traces", "nowhere"], ["traces nowhere", "no such folder"]),
    ],
)
def test_bad_options_end_with_2_and_a_fix(workload: Path, options: list[str], words: list[str]) -> None:
    done = simulate("--workload", workload, *options)
    assert done.exit_code == 2
    for word in words:
        assert word in done.output


@pytest.mark.parametrize(
    ("option", "place", "words"),
    [
        ("--out", "nowhere/results.json", "name a folder that exists"),
        ("--out", "set", "name a file in it"),
        ("--out", "/proc/results.json", "name a folder that you may write"),
        ("--out", "timings.json", "name another file"),
        ("--out", "/", "name a file in it"),
        ("--out", "/dev/null", "is a device or a pipe"),
        ("--plot", "set/workload-6.csv", "is a file; name a folder"),
        ("--plot", "set/workload-6.csv/plots", "is a file; name a folder"),
        ("--plot", "/proc/plots", "name a folder that you may write"),
    ],
)
def test_a_place_that_takes_no_results_is_told_before_anything_runs(
    workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, place: str, words: str
) -> None:
    monkeypatch.setattr(runner, "simulate", lambda *_, **__: pytest.fail("it has begun"))
    before = sorted(tmp_path.rglob("*"))
    places = {"--out": tmp_path / "results.json"} | {option: tmp_path / place}
    done = simulate("--workload", workload, *(word for pair in places.items() for word in pair))
    assert done.exit_code == 2, done.output
    assert words in " ".join(done.output.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_on_a_disk_that_is_full_in_the_end_the_figures_are_still_shown(
    workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, document: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_document", full)
    done = simulate("--workload", workload, "--policy", "fifo", "--out", tmp_path / "r.json", "--json")
    assert done.exit_code == 1
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr
    assert json.loads(done.stdout)["avg_jct_s"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "ours", "--p", "3"], "--p changes nothing: policy ours has no fairness knob"),
        (["--policy", "sia", "--no-avoid-interference"], "--no-avoid-interference changes nothing"),
        (["--policy", "sia", "--interference", "0.5"], "--interference changes nothing"),
        (["--policy", "pollux", "--interference", "0.5"], "--no-avoid-interference lets jobs meet"),
        (["--policy", "themis", "--earlier-fits"], "--earlier-fits changes nothing: under themis"),
        (["--policy", "ours", "--seed", "3"], "--seed changes nothing: policy ours draws nothing"),
        (["--policy", "tiresias", "--earlier-fits"], "--earlier-fits changes nothing"),
        (["--policy", "fifo", "--cluster", "small"], "change nothing beside --cluster small"),
    ],
)
def test_options_that_change_nothing_are_said_to(
    workload: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    done = simulate("--workload", workload, "--out", tmp_path / "results.json", *options)
    assert done.exit_code == 0, done.output
    assert words in done.stderr
    out = ["--workload", workload, "--out", tmp_path / "r.json"]
    for heeded in (
        ["--policy", "sia", "--p", "1", "--earlier-fits", "--restart-s", "60"],
        ["--policy", "pollux", "--seed", "3", "--interference", "0.5", "--no-avoid-interference"],
    ):
        assert "changes nothing" not in simulate(*out, *heeded).stderr


def test_a_restart_whose_cost_the_cluster_knows_is_not_the_option_s(workload: Path, tmp_path: Path) -> None:
    """Of one application the option still says it."""
    cluster = {"groups": [{"nodes": 2, "gpus": 4}], "restart_s": {"bert": 40}}
    for costs, unheard in (({"bert": 40, "deepspeech2": 20}, True), ({"bert": 40}, False)):
        file = tmp_path / "cluster.json"
        file.write_text(json.dumps(cluster | {"restart_s": costs}))
        options = ["--cluster", file, "--restart-s", "900", "--policy", "fifo"]
        done = CliRunner().invoke(
            app, ["simulate", *map(str, ["--workload", workload, "--out", tmp_path / "r.json", *options])]
        )
        assert done.exit_code == 0, done.output
        assert ("--restart-s changes nothing" in done.stderr) == unheard


@pytest.mark.parametrize("place", ["", "."])
def test_an_output_without_a_name_is_refused(workload: Path, place: str) -> None:
    done = simulate("--workload", workload, "--out", place)
    assert done.exit_code == 2 and "name a file in it" in done.output


def test_results_go_where_a_link_leads(workload: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    assert simulate("--workload", workload, "--policy", "fifo", "--out", link).exit_code == 0
    assert link.is_symlink() and json.loads(target.read_text())["workloads"]


def test_what_a_cluster_says_of_unknown_applications_is_said_to_change_nothing(
    workload: Path, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"groups": [{"nodes": 2, "gpus": 4}], "restart_s": {"bret": 5}}))
    options = ["--workload", workload, "--out", tmp_path / "r.json", "--cluster", file, "--policy", "fifo"]
    done = CliRunner().invoke(app, ["simulate", *map(str, options)])
    assert done.exit_code == 0, done.output
    assert "restart_s of 'bret' changes nothing" in done.stderr


def test_results_replace_no_pipe(workload: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = simulate("--workload", workload, "--out", pipe)
    assert done.exit_code == 2 and "is a device or a pipe" in done.output
    assert pipe.is_fifo()


ENDLESS = "name,time,application,num_replicas,batch_size\na,0,bert,1,12\nb,300000000,bert,1,12\n"
"""Between the two jobs lie millions of rounds."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], list[psutil.Process]]]]:
    """Starts a simulation in two processes and waits until both work: the command and all below it."""
    files = [tmp_path / f"workload-{number}.csv" for number in (1, 2)]
    for file in files:
        file.write_text(ENDLESS)
    words = [word for file in files for word in ("--workload", str(file))]
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        command = [sys.executable, "-c", "from pollux.cli import app; app()", "simulate", *words]
        command += ["--policy", "fifo", "--jobs", "2", "--out", str(tmp_path / "results.json")]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(run)
        top, end_s = psutil.Process(run.pid), time.monotonic() + 60
        while time.monotonic() < end_s:
            below = top.children(recursive=True)
            busy = [each for each in below if each.cpu_times().user > 0.3]
            if len(busy) == 2:
                return run, below
            time.sleep(0.1)
        raise AssertionError(f"no two processes came to work: {below}")

    yield start
    for run in started:
        run.kill()
        run.wait()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_an_interrupted_command_and_nothing_is_written(
    running: Callable[[], tuple[subprocess.Popen[str], list[psutil.Process]]],
    tmp_path: Path,
    how: signal.Signals,
) -> None:
    run, below = running()
    run.send_signal(how)
    assert run.wait(20) != 0
    _, alive = psutil.wait_procs(below, timeout=10)
    alive = [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    for each in alive:
        each.kill()
    assert not alive
    assert run.stdout is not None and "Traceback" not in run.stdout.read()
    assert not list(tmp_path.glob("*.json*"))


def test_a_process_that_the_system_kills_ends_the_command_in_words(
    running: Callable[[], tuple[subprocess.Popen[str], list[psutil.Process]]],
) -> None:
    run, below = running()
    max(below, key=lambda each: each.cpu_times().user).kill()
    assert run.wait(20) == 1
    assert run.stdout is not None
    text = run.stdout.read()
    assert "one of 2 processes was killed" in text and "--jobs" in text and "Traceback" not in text


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
    assert len(list(state.glob("*--seed*.json"))) == 4


def test_reproduce_takes_no_simulations_of_other_traces(published: Path, tmp_path: Path) -> None:
    command = ["bench", "reproduce", "--only", "tiresias load 1.0", "--state", str(tmp_path / "state")]
    assert CliRunner().invoke(app, [*command, "--traces", str(published)]).exit_code == 1
    elsewhere = Path(shutil.copytree(published, tmp_path / "elsewhere"))
    resumed = [*command, "--traces", str(elsewhere), "--resume", "--json"]
    assert CliRunner().invoke(app, resumed).exit_code == 1, "they are the same, wherever they are"
    changed = elsewhere / "workloads/philly-1.0/workload-1.csv"
    changed.write_text(changed.read_text().replace(",48", ",24"))
    refused = CliRunner().invoke(app, resumed)
    assert refused.exit_code == 2 and "name another folder" in refused.output


def test_simulations_of_another_version_are_not_taken_for_ones_of_this(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["bench", "reproduce", "--only", "tiresias load 1.0", "--state", str(tmp_path / "state")]
    command += ["--traces", str(published), "--resume"]
    assert CliRunner().invoke(app, command).exit_code == 1
    monkeypatch.setattr("pollux.simulate.kept.__version__", "99.0")
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "has now: pollux 99.0" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: '{"result": {}}',
        lambda text: '{"result": [["avg_jct_s", 1]]}',
        lambda text: text.replace('"avg_jct_s": ', '"avg_jct_s": "a", "b": '),
        lambda text: text.replace('"avg_jct_s": ', '"avg_jct_s": -'),
        lambda text: text.replace('"avg_jct_s": ', '"avg_jct_s": NaN, "b": '),
        lambda text: "\xff\x00",
    ],
)
def test_a_damaged_result_is_simulated_again(
    published: Path, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    state = tmp_path / "state"
    command = ["bench", "reproduce", "--traces", str(published), "--only", "tiresias load 1.0", "--json"]
    command += ["--state", str(state), "--resume"]
    first = CliRunner().invoke(app, command)
    (kept,) = state.glob("*--seed*.json")
    whole = json.loads(kept.read_text())["result"]
    kept.write_bytes(damage(kept.read_text()).encode("latin-1"))
    again = CliRunner().invoke(app, command)
    assert (again.exit_code, again.stdout) == (first.exit_code, first.stdout)
    assert json.loads(kept.read_text())["result"] == whole


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("", "Invalid JSON"),
        ("[]", "should be an object"),
        ('{"load": {}}', "interval: missing"),
        ('{"load": {"pollux": 5}, "interval": {}, "interference": {}}', "load.pollux"),
        (
            '{"load": {}, "interval": {"8m": {"workload-1": "x"}}, "interference": {}}',
            "interval.8m.workload-1",
        ),
        (
            '{"load": {}, "interval": {"8m": {"workload-1": -1}}, "interference": {}}',
            "interval.8m.workload-1",
        ),
    ],
)
def test_reproduce_needs_the_published_results(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "reference-results.json").write_text(text)
    done = CliRunner().invoke(app, ["bench", "reproduce", "--traces", str(tmp_path)])
    assert done.exit_code == 2
    assert "reference-results.json" in done.output and words in done.output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["bench", "reproduce", "--state", "FILE"], "--state FILE: FILE is a file; name a folder"),
        (["bench", "reproduce", "--only", "tires", "--state", "FILE/x"], "FILE is a file"),
        (["bench", "reproduce", "--only", "best"], "no group begins so; there are tiresias load 0.5, "),
        (["report", "--out", "FILE"], "--out FILE: FILE is a file; name a folder"),
        (["autoscale", "--restart-s", "inf"], "--restart-s (restart_s)"),
        (["autoscale", "--restart-s", "nan"], "--restart-s (restart_s)"),
        (["autoscale", "--interval", "nan"], "--interval (interval_s)"),
        (["autoscale", "--interval", "0.5"], "greater than or equal to 1 (got 0.5)"),
        (["autoscale", "--nodes", "100000"], "--nodes (most_nodes): Input should be less than or equal to"),
        (["autoscale", "--gpus-per-node", "0"], "--gpus-per-node (gpus_per_node)"),
    ],
)
def test_commands_over_many_simulations_refuse_in_words(
    published: Path, tmp_path: Path, command: list[str], words: str
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    options = [] if command[0] == "autoscale" else ["--traces", str(published)]
    done = CliRunner().invoke(app, [*(word.replace("FILE", str(file)) for word in command), *options])
    assert done.exit_code == 2
    assert words.replace("FILE", str(file)) in done.output
    assert file.read_text() == "x"
