"""The reporter's process delivers all that a training hands it, outlasts signals, and ends with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fitted import FIT
from mlflow import MlflowClient

from pollux_agent.protocol import REPORT_TAG, Report, decode, encode
from pollux_agent.report import ReporterApart
from pollux_agent.report.prior import MODEL_PARAM, Earlier
from pollux_agent.report.unsent import read_unsent

AWAY = "http://127.0.0.1:9"
REPORT = Report(
    job_id="digits",
    incarnation=1,
    sequence=0,
    time_unix_s=1.7e9,
    initial_batch_size=32,
    max_batch_size=64,
    max_local_batch_size=64,
    max_gpus_seen=1,
)
TRAINING = """
import signal, sys, time
from pathlib import Path
from pollux_agent.report import ReporterApart

signal.signal(signal.SIGTERM, signal.SIG_IGN)
uri, run_id, unsent = sys.argv[1:]
reporter = ReporterApart(uri, run_id, 1, unsent=Path(unsent))
for step in range(3):
    reporter.metrics({"loss": float(step)}, step)
print("mlflow" in sys.modules, flush=True)
sys.stdin.readline()
print(reporter.close(60), flush=True)
"""


@pytest.fixture
def client(mlflow_uri: str) -> MlflowClient:
    return MlflowClient(mlflow_uri)


def steps_of(client: MlflowClient, run_id: str, name: str) -> list[int]:
    return sorted(point.step for point in client.get_metric_history(run_id, name))


def awaited(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "the condition did not come about"
        time.sleep(0.05)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "pollux_agent.report.sender" in child.cmdline()]


def test_figures_the_report_a_file_and_the_end_arrive(
    client: MlflowClient, mlflow_uri: str, run_id: str, tmp_path: Path
) -> None:
    reporter = ReporterApart(mlflow_uri, run_id, 1)
    began_ms = time.time() * 1000
    for step in range(1200):
        reporter.metrics({"loss": step / 2}, step)
    given_ms = time.time() * 1000
    reporter.metrics({"loss": float("nan"), "words": "none"}, 1200)  # type: ignore[dict-item]
    reporter.report(REPORT)
    reporter.artifact("profile/raw.json", b'{"rows": []}\n\xff')
    reporter.finish("FINISHED")
    assert reporter.close(60)
    assert steps_of(client, run_id, "loss") == list(range(1200))
    times_ms = [point.timestamp for point in client.get_metric_history(run_id, "loss")]
    assert began_ms - 1 <= min(times_ms) and max(times_ms) <= given_ms + 1
    run = client.get_run(run_id)
    assert run.data.metrics["nonfinite_values"] == 2
    assert decode(Report, run.data.tags[REPORT_TAG]) == REPORT
    assert run.info.status == "FINISHED"
    stored = Path(client.download_artifacts(run_id, "profile/raw.json", str(tmp_path)))
    assert stored.read_bytes() == b'{"rows": []}\n\xff'
    assert not children()
    reporter.metrics({"late": 1.0}, 1)
    assert not children(), "what comes behind the close is for nobody"


def test_what_earlier_runs_know_is_given(
    client: MlflowClient, mlflow_uri: str, new_experiment: Callable[[str], str]
) -> None:
    experiment = client.get_experiment_by_name(new_experiment("apart")).experiment_id
    earlier, own = (client.create_run(experiment).info.run_id for _ in range(2))
    for each in (earlier, own):
        client.log_param(each, MODEL_PARAM, "net")
    client.set_tag(earlier, REPORT_TAG, encode(replace(REPORT, fits={"a100": FIT}, gpus_seen={"a100": 4})))
    given: list[Earlier] = []
    reporter = ReporterApart(mlflow_uri, own, 1)
    reporter.ask_for_earlier(given.append)
    awaited(lambda: given)
    assert reporter.close(60)
    assert given == [Earlier(fits={"a100": FIT}, gpus_seen={"a100": 4}, max_gpus_seen=1)]


def test_a_reporter_that_was_given_nothing_starts_no_process() -> None:
    reporter = ReporterApart(AWAY, "r", 1)
    assert not children()
    assert reporter.close(0)


def test_what_cannot_be_sent_is_kept_and_sent_by_the_next(
    client: MlflowClient, mlflow_uri: str, run_id: str, tmp_path: Path
) -> None:
    unsent = tmp_path / "unsent.json"
    first = ReporterApart(AWAY, run_id, 1, unsent=unsent)
    first.metrics({"loss": 1.0}, 1)
    assert not first.close(0.2)
    assert [point.step for point in read_unsent(unsent)] == [1]
    second = ReporterApart(mlflow_uri, run_id, 2, unsent=unsent)
    second.metrics({"loss": 2.0}, 2)
    assert second.close(60)
    assert steps_of(client, run_id, "loss") == [1, 2]
    assert not unsent.exists()


def test_one_that_is_killed_is_started_again(client: MlflowClient, mlflow_uri: str, run_id: str) -> None:
    reporter = ReporterApart(mlflow_uri, run_id, 1)
    reporter.metrics({"loss": 1.0}, 1)
    reporter.report(REPORT)
    awaited(lambda: REPORT_TAG in client.get_run(run_id).data.tags)
    (process,) = children()
    process.kill()
    awaited(lambda: process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    reporter.metrics({"loss": 2.0}, 2)
    reporter.metrics({"loss": 3.0}, 3)
    assert reporter.close(60)
    assert steps_of(client, run_id, "loss") == [1, 2, 3]


def given_every_few_ms(reporter: ReporterApart, steps: range) -> None:
    for step in steps:
        reporter.metrics({"loss": step / 2, "odd": float("nan") if step % 7 == 0 else 1.0}, step)
        time.sleep(0.003)


def test_none_of_what_flows_while_it_is_killed_again_and_again_is_lost_or_twice(
    client: MlflowClient, mlflow_uri: str, run_id: str
) -> None:
    """The last kill comes right before the close, and the report's process dies with the report unsent."""
    reporter = ReporterApart(mlflow_uri, run_id, 1)
    for part in range(4):
        given_every_few_ms(reporter, range(120 * part, 120 * (part + 1)))
        reporter.report(replace(REPORT, sequence=part))  # with which all goes out at once
        awaited(children)
        if part == 1:
            awaited(lambda: not reporter._kept)  # all are acknowledged
        for process in children():
            process.kill()
    assert reporter.close(60)
    history = {name: steps_of(client, run_id, name) for name in ("loss", "odd", "nonfinite_values")}
    assert history == {
        "loss": list(range(480)),
        "odd": [step for step in range(480) if step % 7],
        "nonfinite_values": [step for step in range(480) if step % 7 == 0],
    }
    run = client.get_run(run_id)
    assert run.data.metrics["nonfinite_values"] == len(range(0, 480, 7))
    assert decode(Report, run.data.tags[REPORT_TAG]).sequence == 3


@pytest.mark.parametrize("is_away", [False, True], ids=["mlflow answers", "mlflow is away"])
def test_what_a_hung_one_holds_at_the_close_is_kept(
    client: MlflowClient,
    mlflow_uri: str,
    run_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_away: bool,
) -> None:
    monkeypatch.setattr("pollux_agent.report.apart._GRACE_S", 0.3)
    unsent = tmp_path / "unsent.json"
    reporter = ReporterApart(AWAY if is_away else mlflow_uri, run_id, 1, unsent=unsent)
    given_every_few_ms(reporter, range(60))
    if not is_away:
        reporter.report(REPORT)  # with which all goes out at once
        awaited(lambda: not reporter._kept)
    awaited(children)
    (process,) = children()
    process.suspend()
    for step in range(60, 2000):  # more than the pipe takes
        reporter.metrics({"loss": step / 2, "a name that fills the pipe between the processes": 1.0}, step)
    assert not reporter.close(0.2)
    assert not children()
    assert "is killed" in caplog.text
    kept = [point.step for point in read_unsent(unsent) if point.name == "loss"]
    assert kept == list(range(0 if is_away else 60, 2000))
    if not is_away:
        following = ReporterApart(mlflow_uri, run_id, 2, unsent=unsent)
        following.metrics({"loss": 1000.0}, 2000)
        assert following.close(60)
        assert steps_of(client, run_id, "loss") == list(range(2001))


@pytest.mark.parametrize("has_file", [True, False])
def test_figures_of_one_that_does_not_come_to_its_close_are_kept_or_said_to_be_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    has_file: bool,
) -> None:
    """It is killed with MLflow away, and each that follows ends by itself."""
    monkeypatch.setattr("pollux_agent.report.apart._GRACE_S", 0.3)
    unsent = tmp_path / "unsent.json"
    reporter = ReporterApart(AWAY, "r", 1, unsent=unsent if has_file else None)
    for step in range(5):
        reporter.metrics({"loss": 1.0, "accuracy": 0.5}, step)
    awaited(children)
    monkeypatch.setattr("pollux_agent.report.apart._COMMAND", (sys.executable, "-c", "raise SystemExit(1)"))
    children()[0].kill()
    assert not reporter.close(0.5)
    if has_file:
        want = [(name, step) for step in range(5) for name in ("loss", "accuracy")]
        assert [(point.name, point.step) for point in read_unsent(unsent)] == want
    else:
        assert "10 figures that MLflow has not taken are lost" in caplog.text


def trains(tmp_path: Path, uri: str, run_id: str) -> "tuple[subprocess.Popen[str], psutil.Process]":
    """A training in a group of its own that has handed over three figures, and the process that has them."""
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING, uri, run_id, str(tmp_path / "unsent.json")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert training.stdout is not None
    assert training.stdout.readline() == "False\n", "the training need not import mlflow"
    awaited(lambda: any(_reads(child) for child in psutil.Process(training.pid).children()))
    (reporter,) = psutil.Process(training.pid).children()
    return training, reporter


def _reads(process: psutil.Process) -> bool:
    """It has called itself by its name, behind its imports, and some time has passed to read."""
    named = process.name() == "pollux-report"
    time.sleep(0.5)
    return named


def test_signals_to_all_of_a_training_end_it_only_with_the_close(
    client: MlflowClient, mlflow_uri: str, run_id: str, tmp_path: Path
) -> None:
    training, reporter = trains(tmp_path, mlflow_uri, run_id)
    os.killpg(training.pid, signal.SIGTERM)
    reporter.send_signal(signal.SIGINT)
    assert reporter.is_running()
    out, _ = training.communicate("\n", timeout=120)
    assert out == "True\n"
    assert steps_of(client, run_id, "loss") == [0, 1, 2]


@pytest.mark.parametrize("pipe", ["closed", "held"])
def test_with_a_training_that_is_killed_it_ends_too_and_keeps_what_waits(tmp_path: Path, pipe: str) -> None:
    """``held``: a process that was forked from the training lives on for a while, with the pipe open."""
    training, reporter = trains(tmp_path, AWAY, "r")
    heir = os.open(f"/proc/{training.pid}/fd/{_pipe_to(reporter, training)}", os.O_WRONLY)
    if pipe == "closed":
        os.close(heir)
    training.kill()
    training.wait()
    awaited(lambda: not reporter.is_running())
    assert [point.step for point in read_unsent(tmp_path / "unsent.json")] == [0, 1, 2]
    if pipe == "held":
        os.close(heir)


def _pipe_to(reporter: psutil.Process, training: "subprocess.Popen[str]") -> str:
    """The number that the reporter's standard input has in the training."""
    wanted = Path(f"/proc/{reporter.pid}/fd/0").readlink()
    numbers = Path(f"/proc/{training.pid}/fd").iterdir()
    return next(number.name for number in numbers if number.readlink() == wanted)
