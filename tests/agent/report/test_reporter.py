"""The reporter against a real MLflow store on SQLite."""

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol import REPORT_TAG, Report, decode, encode
from pollux_agent.report import MlflowReporter, NullReporter, open_reporter
from pollux_agent.report.outbox import Outbox, Point
from pollux_agent.report.reporter import INCARNATION_TAG
from pollux_agent.report.unsent import keep_unsent, read_unsent
from pollux_agent.settings import WorkerSettings

FIT = ThroughputParams(
    alpha_grad=0.1,
    beta_grad=0.01,
    alpha_sync_local=0.02,
    beta_sync_local=0.001,
    alpha_sync_node=0.05,
    beta_sync_node=0.002,
    gamma=1.5,
)


def a_report(*, incarnation: int = 1, sequence: int = 0, gpu_types: int = 1) -> Report:
    return Report(
        job_id="digits-0123456789",
        incarnation=incarnation,
        sequence=sequence,
        time_unix_s=1_700_000_000.0 + sequence,
        fits={f"gpu-{index}": FIT for index in range(gpu_types)},
        initial_batch_size=32,
        max_batch_size=1024,
        max_local_batch_size=128,
        max_gpus_seen=2,
    )


def history(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))


@pytest.fixture
def client(mlflow_uri: str) -> MlflowClient:
    return MlflowClient(mlflow_uri)


def test_more_points_than_one_call_may_carry_all_arrive(
    client: MlflowClient, mlflow_uri: str, run_id: str
) -> None:
    reporter = MlflowReporter(mlflow_uri, run_id, 1)
    for step in range(1500):
        reporter.metrics({"loss": step / 2}, step)
    assert reporter.close(60)
    assert history(client, run_id, "loss") == [(step, step / 2) for step in range(1500)]


def test_the_latest_report_a_file_and_the_end_of_the_run_are_stored(
    client: MlflowClient, mlflow_uri: str, run_id: str, tmp_path: Path
) -> None:
    reporter = MlflowReporter(mlflow_uri, run_id, 1)
    for sequence in range(5):
        reporter.report(a_report(sequence=sequence))
    reporter.artifact("profile/raw.json", b'{"old": 1}')
    reporter.artifact("profile/raw.json", b'{"rows": []}')
    reporter.finish("FINISHED")
    assert reporter.close(60)
    run = client.get_run(run_id)
    assert decode(Report, run.data.tags[REPORT_TAG]) == a_report(sequence=4)
    assert run.info.status == "FINISHED"
    stored = Path(client.download_artifacts(run_id, "profile/raw.json", str(tmp_path)))
    assert stored.read_bytes() == b'{"rows": []}'


def test_values_that_are_not_finite_are_counted_and_not_logged(
    client: MlflowClient, mlflow_uri: str, run_id: str
) -> None:
    reporter = MlflowReporter(mlflow_uri, run_id, 1)
    reporter.metrics({"noise": float("nan"), "loss": 1.0, "goodput": float("inf")}, 1)
    reporter.metrics({"noise": 2.0, "goodput": -1e308}, 2)
    assert reporter.close(60)
    assert history(client, run_id, "loss") == [(1, 1.0)]
    assert history(client, run_id, "noise") == [(2, 2.0)]
    assert history(client, run_id, "goodput") == []
    assert history(client, run_id, "nonfinite_values") == [(1, 2.0), (2, 3.0)]


def test_a_report_that_mlflow_would_cut_is_refused_with_a_log_line(
    client: MlflowClient, mlflow_uri: str, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = MlflowReporter(mlflow_uri, run_id, 1)
    reporter.report(a_report(sequence=1))
    with caplog.at_level(logging.ERROR):
        reporter.report(a_report(sequence=2, gpu_types=60))
    assert reporter.close(60)
    assert "7500" in caplog.text
    assert decode(Report, client.get_run(run_id).data.tags[REPORT_TAG]).sequence == 1


def test_an_older_incarnation_writes_nothing_once_a_newer_one_began(
    client: MlflowClient, mlflow_uri: str, run_id: str
) -> None:
    older = MlflowReporter(mlflow_uri, run_id, 1, flush_interval_s=0.05)
    older.metrics({"loss": 1.0}, 1)
    older.report(a_report(incarnation=1))
    wait_for(lambda: REPORT_TAG in client.get_run(run_id).data.tags)
    newer = MlflowReporter(mlflow_uri, run_id, 2)
    newer.metrics({"loss": 2.0}, 2)
    assert newer.close(60)
    older.metrics({"loss": 3.0}, 3)
    older.report(a_report(incarnation=1, sequence=1))
    wait_for(lambda: older.fenced or REPORT_TAG not in client.get_run(run_id).data.tags)
    older.metrics({"loss": 4.0}, 4)
    older.finish("FAILED")
    assert older.close(60)
    assert not newer.fenced
    assert decode(Report, client.get_run(run_id).data.tags[REPORT_TAG]).sequence == 0
    assert (4, 4.0) not in history(client, run_id, "loss")
    assert client.get_run(run_id).info.status == "RUNNING"


@pytest.mark.parametrize(
    ("tags", "fenced"),
    [
        pytest.param({REPORT_TAG: encode(a_report(incarnation=6))}, True, id="a newer report"),
        pytest.param({INCARNATION_TAG: "6"}, True, id="a newer incarnation that has not reported yet"),
        pytest.param({REPORT_TAG: encode(a_report(incarnation=5))}, False, id="its own report"),
        pytest.param({REPORT_TAG: "{garbage", INCARNATION_TAG: "9" * 5000}, False, id="garbage"),
    ],
)
def test_who_wrote_last_decides_before_the_first_write(
    client: MlflowClient, mlflow_uri: str, run_id: str, tags: dict[str, str], fenced: bool
) -> None:
    for name, value in tags.items():
        client.set_tag(run_id, name, value)
    reporter = MlflowReporter(mlflow_uri, run_id, 5)
    reporter.metrics({"loss": 1.0}, 1)
    assert reporter.close(60)
    assert reporter.fenced is fenced
    assert bool(history(client, run_id, "loss")) is not fenced


def test_a_store_that_cannot_be_opened_costs_training_neither_time_nor_an_error(tmp_path: Path) -> None:
    reporter = MlflowReporter(f"sqlite:///{tmp_path}/no/such/folder/mlflow.db", "run", 1, max_points=1000)
    started_s = time.monotonic()
    for step in range(5000):
        reporter.metrics({"loss": 1.0}, step)
    reporter.report(a_report())
    assert time.monotonic() - started_s < 1.0
    assert not reporter.close(0.2)
    assert time.monotonic() - started_s < 3.0


def test_what_mlflow_did_not_take_before_the_end_is_sent_by_the_next_incarnation(
    client: MlflowClient, mlflow_uri: str, run_id: str, tmp_path: Path
) -> None:
    unsent = tmp_path / "unsent.json"
    for incarnation in (1, 2):
        away = MlflowReporter("http://127.0.0.1:9", run_id, incarnation, unsent=unsent)
        away.metrics({"loss": float(incarnation), "accuracy": 0.5}, incarnation)
        assert not away.close(0.1)
        wait_for(lambda reporter=away: not reporter._thread.is_alive())
    assert len(read_unsent(unsent)) == 4, "the second one kept the first one's too"
    for incarnation in (3, 4):
        reporter = MlflowReporter(mlflow_uri, run_id, incarnation, unsent=unsent)
        reporter.metrics({"loss": float(incarnation)}, incarnation)
        assert reporter.close(60)
        assert not unsent.exists()
    assert history(client, run_id, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert history(client, run_id, "accuracy") == [(1, 0.5), (2, 0.5)]


def test_points_of_earlier_come_first_and_take_no_room_from_those_of_now() -> None:
    outbox = Outbox(max_points=3, max_artifact_bytes=0)
    earlier, now = ([Point(name, 0.0, step, 0) for step in range(2)] for name in ("earlier", "now"))
    outbox.put_points(now)
    outbox.put_first(earlier)
    assert outbox.points == (earlier[1], *now)


@pytest.mark.parametrize(
    "content",
    ["", "{", "7", "[1]", '[["loss", 1.0, 2]]', '[["loss", "much", 2, 3]]', '[["loss", 1, 1e999, 3]]'],
)
def test_a_file_of_figures_that_is_something_else_counts_as_none(tmp_path: Path, content: str) -> None:
    unsent = tmp_path / "unsent.json"
    unsent.write_text(content)
    assert read_unsent(unsent) == ()


def test_a_run_that_mlflow_refuses_to_write_does_not_hold_up_what_comes_later(
    client: MlflowClient, mlflow_uri: str, run_id: str
) -> None:
    reporter = MlflowReporter(mlflow_uri, run_id, 1, flush_interval_s=0.05)
    reporter.metrics({"not: allowed?": 1.0}, 1)
    reporter.report(a_report(sequence=7))
    wait_for(lambda: REPORT_TAG in client.get_run(run_id).data.tags)
    reporter.metrics({"loss": 1.0}, 2)
    assert reporter.close(60)
    assert history(client, run_id, "loss") == [(2, 1.0)]


def _write(uri: str, runs: dict[str, str]) -> None:
    """Each named writer reports 60 small batches to its run."""
    reporters = {name: MlflowReporter(uri, run, 1, flush_interval_s=0.0) for name, run in runs.items()}
    for step in range(60):
        for name, reporter in reporters.items():
            reporter.metrics({name: float(step)}, step)
    for reporter in reporters.values():
        assert reporter.close(100)


def test_eight_writers_in_two_processes_and_a_reader_on_one_sqlite_file_lose_nothing(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(uri)
    experiment = client.create_experiment("many", artifact_location=(tmp_path / "files").as_uri())
    runs = {f"writer_{number}": client.create_run(experiment).info.run_id for number in range(8)}
    names = sorted(runs)
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_write, args=(uri, {name: runs[name] for name in half}))
        for half in (names[:4], names[4:])
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        client.search_runs([experiment])
        time.sleep(0.05)
    assert [writer.exitcode for writer in writers] == [0, 0]
    for name, run in runs.items():
        assert history(client, run, name) == [(step, float(step)) for step in range(60)]


def test_a_worker_without_a_run_reports_to_nowhere() -> None:
    assert isinstance(open_reporter(None), NullReporter)
    reporter = open_reporter(
        WorkerSettings(
            job_id="job", job_dir=Path("/job"), incarnation=0, node="node-0", slots=(0,), placement={}
        )
    )
    reporter.metrics({"loss": float("nan")}, 1)
    reporter.report(a_report())
    reporter.artifact("a", b"")
    reporter.finish("FINISHED")
    assert reporter.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "the condition did not come about"
        time.sleep(0.01)


def test_a_metric_name_that_mlflow_refuses_costs_only_that_metric(
    client: MlflowClient, mlflow_uri: str, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = MlflowReporter(mlflow_uri, run_id, 1)
    for step in range(1, 21):
        reporter.metrics({"loss": step, "loss: mean?!": step, "accuracy": 2 * step}, step)
    reporter.report(a_report(sequence=3))
    assert reporter.close(60)
    assert history(client, run_id, "loss") == [(step, float(step)) for step in range(1, 21)]
    assert history(client, run_id, "accuracy") == [(step, 2.0 * step) for step in range(1, 21)]
    assert decode(Report, client.get_run(run_id).data.tags[REPORT_TAG]).sequence == 3
    assert caplog.text.count("refuses the metric 'loss: mean?!'") == 1


def test_a_close_before_the_thread_has_had_a_turn_keeps_what_was_kept_and_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsent = tmp_path / "unsent.json"
    keep_unsent(unsent, [Point("loss", 1.0, 1, 1_700_000_000_000)])
    turn = threading.Event()
    monkeypatch.setattr(MlflowReporter, "_work", lambda _: turn.wait(60))
    reporter = MlflowReporter("http://127.0.0.1:9", "r", 2, unsent=unsent)
    reporter.metrics({"loss": 2.0}, 2)
    assert not reporter.close(0.0)
    turn.set()
    assert [point.step for point in read_unsent(unsent)] == [1, 2]
