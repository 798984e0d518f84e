"""The reporter and the store against an MLflow server that goes away, comes back, and refuses."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient

from pollux_agent.driver.kube.left import send_left
from pollux_agent.protocol import REPORT_TAG, JobFolder, Report, decode
from pollux_agent.report import MlflowReporter
from pollux_agent.report.outbox import Point
from pollux_agent.report.unsent import keep_unsent, read_unsent


class Server:
    """An MLflow server on a loopback port that stays the same over restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(Path(sys.executable).with_name("mlflow")),
            "server",
            f"--backend-store-uri=sqlite:///{self._folder / 'mlflow.db'}",
            f"--artifacts-destination={self._folder / 'files'}",
            "--host=127.0.0.1",
            f"--port={self.port}",
            "--workers=1",
        ]
        environ = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        until_s = time.monotonic() + 120
        while not self._answers():
            assert time.monotonic() < until_s, (self._folder / "server.log").read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def run_on_server(server: Server) -> str:
    client = MlflowClient(server.url)
    return str(client.create_run("0").info.run_id)


def a_report(sequence: int) -> Report:
    return Report(
        job_id="digits",
        incarnation=1,
        sequence=sequence,
        time_unix_s=1.7e9,
        initial_batch_size=32,
        max_batch_size=64,
        max_local_batch_size=64,
        max_gpus_seen=1,
    )


REFUSALS = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 429: "REQUEST_LIMIT_EXCEEDED"}


@contextmanager
def refusing_first(
    upstream: str, *, times: int, refusal: int = 429, after: int = 0
) -> Iterator[tuple[str, list[int]]]:
    """A proxy that passes ``after`` writes, answers the next ``times`` with ``refusal``, then passes all."""
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            refuses = len(statuses) >= after and statuses.count(refusal) < times
            if self.path.endswith("log-batch") and refuses:
                status, content = refusal, json.dumps({"error_code": REFUSALS[refusal]}).encode()
            else:
                answer = httpx.request(
                    self.command,
                    upstream + self.path,
                    content=body,
                    headers={"Content-Type": self.headers.get("Content-Type") or "application/json"},
                    timeout=30,
                )
                status, content = answer.status_code, answer.content
            if self.path.endswith("log-batch"):
                statuses.append(status)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _pass

        def log_message(self, *args: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", statuses
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


def test_a_server_that_is_too_busy_is_asked_again(server: Server, run_on_server: str) -> None:
    with refusing_first(server.url, times=2) as (url, statuses):
        reporter = MlflowReporter(url, run_on_server, 1, flush_interval_s=0.05)
        for step in range(20):
            reporter.metrics({"loss": float(step)}, step)
        assert reporter.close(60)
    assert statuses.count(429) == 2
    points = MlflowClient(server.url).get_metric_history(run_on_server, "loss")
    assert sorted(point.step for point in points) == list(range(20))


@pytest.mark.parametrize("refusal", [401, 403])
def test_rights_that_are_lost_for_a_while_cost_no_figure(
    server: Server, run_on_server: str, refusal: int
) -> None:
    with refusing_first(server.url, times=5, refusal=refusal, after=1) as (url, statuses):
        reporter = MlflowReporter(url, run_on_server, 1, flush_interval_s=0.05)
        for step in range(20):
            reporter.metrics({"loss": float(step), "accuracy": step / 20}, step)
            time.sleep(0.02)
        assert reporter.close(60)
    assert statuses.count(refusal) == 5
    for name in ("loss", "accuracy"):
        points = MlflowClient(server.url).get_metric_history(run_on_server, name)
        assert sorted(point.step for point in points) == list(range(20))


def test_what_is_reported_while_the_server_is_away_arrives_in_order_once_it_is_back(
    server: Server, run_on_server: str
) -> None:
    reporter = MlflowReporter(server.url, run_on_server, 1, flush_interval_s=0.05)
    reporter.metrics({"loss": 0.0}, 0)
    reporter.report(a_report(0))
    client = MlflowClient(server.url)
    until_s = time.monotonic() + 60
    while REPORT_TAG not in client.get_run(run_on_server).data.tags:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    server.stop()
    slowest_s = 0.0
    for step in range(1, 601):
        started_s = time.perf_counter()
        reporter.metrics({"loss": float(step)}, step)
        reporter.report(a_report(step))
        slowest_s = max(slowest_s, time.perf_counter() - started_s)
        time.sleep(0.002)
    assert slowest_s < 0.5
    reporter.artifact("profile/raw.json", b"{}")
    reporter.finish("FINISHED")
    server.start()
    assert reporter.close(60)
    run = client.get_run(run_on_server)
    assert run.info.status == "FINISHED"
    assert decode(Report, run.data.tags[REPORT_TAG]).sequence == 600
    points = client.get_metric_history(run_on_server, "loss")
    assert sorted(point.step for point in points) == list(range(601))
    times = [point.timestamp for point in sorted(points, key=lambda point: point.step)]
    assert times == sorted(times)
    assert [file.path for file in client.list_artifacts(run_on_server, "profile")] == ["profile/raw.json"]


def test_what_a_jobs_workers_could_not_send_its_driver_sends_once_it_can(
    server: Server, run_on_server: str, tmp_path: Path
) -> None:
    folder = JobFolder(tmp_path)
    points = [Point("loss", 1.0 / (1 + step), step, 1_700_000_000_000 + step) for step in range(700)]
    keep_unsent(folder.unsent, points)
    where = {"tracking_uri": server.url, "run_id": run_on_server, "incarnation": 3}
    server.stop()
    closing = threading.Event()
    assert not send_left(folder, **where, closing=closing, try_for_s=0.5)
    assert read_unsent(folder.unsent) == tuple(points), "without MLflow all of them stay"
    server.start()
    closing.set()
    assert send_left(folder, **where, closing=closing), "also if it is told to end meanwhile"
    history = MlflowClient(server.url).get_metric_history(run_on_server, "loss")
    assert sorted((point.step, point.value, point.timestamp) for point in history) == [
        (point.step, point.value, point.time_ms) for point in points
    ]
    keep_unsent(folder.unsent, points[:1])
    assert not send_left(folder, **where | {"incarnation": 2}, closing=closing), "a newer one writes the run"
