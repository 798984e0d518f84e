"""The run of a training that no scheduler started: its password stays hidden, a busy server is asked anew."""

import base64
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from mlflow.exceptions import MlflowException, RestException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from pollux_agent.report import MlflowReporter, NullReporter, alone
from pollux_agent.report.alone import open_run
from pollux_agent.settings import TrackingSettings

SCRIPT = """
import logging, sys
from pathlib import Path
from pollux_agent.records import FileNote
from pollux_agent.report.alone import open_run
from pollux_agent.settings import TrackingSettings

logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
reporter = open_run(
    TrackingSettings(tracking_uri=sys.argv[1]), name="t", incarnation=0, memory=FileNote(Path(sys.argv[2]))
)
reporter.metrics({"loss": 1.0}, 1)
reporter.finish("FINISHED")
print("sent", reporter.close(30))
"""


class Recorder(BaseHTTPRequestHandler):
    """Answers as an MLflow that has one run, and keeps the log-ins that it is shown."""

    seen: ClassVar[set[str]] = set()
    run = b'{"run": {"info": {"run_id": "r", "run_uuid": "r", "experiment_id": "0"}, "data": {}}}'

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.add(self.headers.get("Authorization", ""))
        experiment = b'{"experiment": {"experiment_id": "0", "name": "Default", "lifecycle_stage": "active"}}'
        body = experiment if "/experiments/" in self.path else self.run
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PATCH = _answer

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def recorder() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_password_of_an_address_reaches_the_server_and_nothing_else(
    recorder: str, tmp_path: Path
) -> None:
    note = tmp_path / "note.json"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"http://ann:g%40heim@{recorder}", str(note)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environ,
        check=False,
    )
    assert "sent True" in done.stdout, done.stdout + done.stderr
    assert Recorder.seen == {"Basic " + base64.b64encode(b"ann:g@heim").decode()}
    told = done.stdout + done.stderr + note.read_text()
    assert "heim" not in told
    assert "127.0.0.1" in note.read_text()


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_server_that_is_busy_when_the_training_begins_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    words = {429: "RESOURCE_EXHAUSTED", 500: "INTERNAL_ERROR", 503: "TEMPORARILY_UNAVAILABLE"}[code]
    answers: list[Exception | str] = [RestException({"error_code": words, "message": "busy"}), "r"]

    def opened(*_: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(alone, "_opened", opened)
    tracking = TrackingSettings(tracking_uri="http://127.0.0.1:9")
    assert isinstance(open_run(tracking, name="t", incarnation=0), MlflowReporter)


def test_a_refusal_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def refused(*_: object) -> str:
        calls.append(1)
        raise MlflowException("no such thing", error_code=INVALID_PARAMETER_VALUE)

    monkeypatch.setattr(alone, "_opened", refused)
    tracking = TrackingSettings(tracking_uri="http://127.0.0.1:9")
    assert isinstance(open_run(tracking, name="t", incarnation=0), NullReporter)
    assert len(calls) == 1
    assert "not reported to MLflow" in caplog.text


def test_figures_that_are_lost_at_the_end_are_said(caplog: pytest.LogCaptureFixture) -> None:
    reporter = MlflowReporter("http://127.0.0.1:9", "r", 0)
    reporter.metrics({"loss": 1.0, "accuracy": 0.5}, 1)
    with caplog.at_level(logging.WARNING):
        assert not reporter.close(0.5)
    assert "2 figures that MLflow has not taken are lost" in caplog.text
