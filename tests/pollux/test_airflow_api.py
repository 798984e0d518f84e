"""The REST client against a small real server that answers as Airflow's API does, and sometimes does not."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from pollux.airflow_api import AirflowApi
from pollux.errors import AirflowApiError, AirflowConflict, AirflowUnavailable, ConfigError

RUN = {"dag_id": "d", "state": "queued", "start_date": None, "end_date": None, "conf": {}}


@dataclass
class Server:
    """What the server saw and what it shall do: ``drop`` closes that many connections without an answer (of
    a trigger once the run is made), and ``broken`` answers that many requests with 500."""

    url: str = ""
    tokens: int = 0
    drop: int = 0
    broken: int = 0
    total_runs: int = 3
    runs: set[str] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        do_PATCH = do_POST

        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            if self.path == "/auth/token":
                state.tokens += 1
                return self.reply(201, {"access_token": f"token-{state.tokens}"})
            state.seen.append(f"{self.command} {self.path}")
            state.bodies.append(body)
            if state.drop:
                state.drop -= 1
                if self.command == "POST":
                    state.runs.add(body["dag_run_id"])
                self.close_connection = True
                return None
            if state.broken:
                state.broken -= 1
                return self.reply(500, {"detail": "Database error"})
            if self.headers["authorization"] != f"Bearer token-{state.tokens}":
                return self.reply(401, {"detail": "Not authenticated"})
            return self.route(body)

        def route(self, body: Any) -> None:
            if self.command == "POST" and self.path.endswith("/dagRuns"):
                if "bad" in body["conf"]:
                    return self.reply(400, {"detail": "bad: not of type integer"})
                if body["dag_run_id"] in state.runs:
                    return self.reply(409, {"detail": "already exists"})
                state.runs.add(body["dag_run_id"])
                return self.reply(200, RUN | {"dag_run_id": body["dag_run_id"]})
            name = unquote(self.path.rsplit("/", 1)[1])
            if self.command == "GET" and name in state.runs:
                return self.reply(200, RUN | {"dag_run_id": name})
            if self.command == "PATCH" and self.path.endswith("/dags/d"):
                return self.reply(200, {})
            if "/dagRuns?" in self.path:
                offset = int(self.path.rsplit("offset=", 1)[1])
                runs = [
                    RUN | {"dag_run_id": f"r{i}"} for i in range(offset, min(offset + 2, state.total_runs))
                ]
                return self.reply(200, {"dag_runs": runs, "total_entries": state.total_runs})
            if self.path.endswith("/dagRuns/page"):
                return self.reply(200, "a page of another server")
            if "/logs/" in self.path:
                content = [{"event": "one"}, {"event": "two", "error_detail": [{"exc_type": "ValueError"}]}]
                return self.reply(200, {"content": content, "continuation_token": None})
            return self.reply(404, {"detail": "not found"})

        def reply(self, status: int, plain: Any) -> None:
            data = json.dumps(plain).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_port}"
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def api(server: Server) -> Iterator[AirflowApi]:
    with AirflowApi(server.url, user="admin", password="x") as api:
        yield api


def test_a_run_is_triggered_with_its_conf(server: Server, api: AirflowApi) -> None:
    run = api.trigger("d", {"epochs": 3}, run_id="mine")
    assert (run.run_id, run.state, run.is_final) == ("mine", "queued", False)
    assert server.bodies == [{"logical_date": None, "conf": {"epochs": 3}, "dag_run_id": "mine"}]


def test_a_refusal_is_raised_in_airflows_words(api: AirflowApi) -> None:
    with pytest.raises(AirflowApiError, match="400: bad: not of type integer"):
        api.trigger("d", {"bad": 1})


def test_an_expired_token_is_renewed_once(server: Server, api: AirflowApi) -> None:
    api.trigger("d", {}, run_id="one")
    server.tokens += 1
    assert api.trigger("d", {}, run_id="two").run_id == "two"
    assert server.tokens == 3


def test_all_pages_are_read(server: Server, api: AirflowApi) -> None:
    server.total_runs = 5
    assert [run.run_id for run in api.dag_runs("d")] == ["r0", "r1", "r2", "r3", "r4"]


def test_reading_is_repeated_after_a_lost_connection(server: Server, api: AirflowApi) -> None:
    server.drop = 2
    assert len(api.dag_runs("d")) == 3


def test_reading_is_repeated_after_an_error_inside_airflow(server: Server, api: AirflowApi) -> None:
    server.broken = 2
    assert len(api.dag_runs("d")) == 3
    server.broken = 100
    with pytest.raises(AirflowApiError, match="500: Database error"):
        api.dag_runs("d")


def test_an_action_that_failed_inside_airflow_is_not_repeated(server: Server, api: AirflowApi) -> None:
    server.broken = 1
    with pytest.raises(AirflowApiError, match="500: Database error"):
        api.trigger("d", {}, run_id="mine")
    assert len(server.seen) == 1


def test_a_pause_is_repeated_since_a_second_one_does_no_harm(server: Server, api: AirflowApi) -> None:
    server.broken = 2
    api.set_paused("d", True)
    assert server.seen == ["PATCH /api/v2/dags/d"] * 3


def test_an_action_whose_answer_was_lost_is_not_repeated(server: Server, api: AirflowApi) -> None:
    server.drop = 1
    with pytest.raises(AirflowUnavailable):
        api.trigger("d", {}, run_id="mine")
    assert len(server.seen) == 1


def test_a_run_without_a_name_is_made_once_however_often_answers_are_lost(
    server: Server, api: AirflowApi
) -> None:
    server.drop, server.broken = 2, 1
    run = api.trigger("d", {})
    assert server.runs == {run.run_id}
    assert api.trigger("d", {}).run_id != run.run_id


def test_a_run_of_a_given_name_may_be_there_already(server: Server, api: AirflowApi) -> None:
    server.drop = 1
    for _ in range(2):
        assert api.trigger("d", {}, run_id="mine", exist_ok=True).run_id == "mine"
    assert server.runs == {"mine"}


def test_a_name_that_is_taken_is_refused(api: AirflowApi) -> None:
    api.trigger("d", {}, run_id="mine")
    with pytest.raises(AirflowConflict, match="409: already exists"):
        api.trigger("d", {}, run_id="mine")


def test_what_airflow_does_not_know_is_none_or_an_error(api: AirflowApi) -> None:
    assert api.dag("d") is None
    assert api.task_instance("d", "r", "t") is None
    with pytest.raises(AirflowApiError, match="404: not found"):
        api.dag_run("d", "r")


def test_an_answer_that_is_no_object_is_an_error_of_ours(api: AirflowApi) -> None:
    with pytest.raises(AirflowApiError, match="really Airflow's API"):
        api.dag_run("d", "page")


def test_names_are_quoted_in_paths(server: Server, api: AirflowApi) -> None:
    api.task_instance("d", "scheduled__2025-01-01T00:00:00+00:00", "a/b", map_index=2)
    assert server.seen == [
        "GET /api/v2/dags/d/dagRuns/scheduled__2025-01-01T00%3A00%3A00%2B00%3A00/taskInstances/a%2Fb/2"
    ]


def test_a_log_is_lines_with_tracebacks(api: AirflowApi) -> None:
    assert api.log("d", "r", "t", try_number=1).splitlines() == ["one", "two", '[{"exc_type": "ValueError"}]']


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_bad_login_file_is_named_without_its_content(tmp_path: Path, text: str) -> None:
    login = tmp_path / "login.json"
    login.write_text(text)
    with pytest.raises(ConfigError, match=r"log-in file .*login\.json: no JSON object user -> password"):
        AirflowApi.from_login("http://127.0.0.1:9", login)
