"""A small client of Airflow's REST API: what the demo, the tests and the check for orphans need of it."""

import json
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx
from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_exponential,
)

from pollux.errors import AirflowApiError, AirflowConflict, AirflowUnavailable, ConfigError

API = "/api/v2"
ATTEMPTS = 5
TIMEOUT_S = 30.0
PAGE_SIZE = 100
TOKEN_AGE_S = 3600.0
FINAL_RUN_STATES = frozenset({"success", "failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """A DAG as Airflow knows it."""

    dag_id: str
    is_paused: bool
    has_import_errors: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DagRun:
    """One run of a DAG; ``state`` is queued, running, success or failed."""

    dag_id: str
    run_id: str
    state: str
    started: datetime | None
    ended: datetime | None
    conf: Mapping[str, Any]

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_RUN_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInstance:
    """One task of a run; ``map_index`` is -1 for an unmapped task, ``state`` None before it is scheduled."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    state: str | None
    try_number: int
    started: datetime | None
    ended: datetime | None


class AirflowApi:
    """Calls Airflow as one user; use it as a context manager, or call :meth:`close`.

    Connection errors are tried again for some seconds, then raised as AirflowUnavailable; an answer that
    refuses raises AirflowApiError with Airflow's own words and is never tried again. A request whose
    answer was lost, or that failed inside Airflow (its SQLite is locked at times), raises AirflowUnavailable
    and is not repeated unless that does no harm.
    """

    def __init__(
        self, url: str, *, user: str, password: str, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._user, self._password = user, password
        if transport is None and self.url.startswith("http://"):
            transport = httpx.HTTPTransport(verify=False)  # no TLS, and certificates take long to load
        self._client = httpx.Client(
            base_url=self.url, timeout=TIMEOUT_S, trust_env=False, transport=transport
        )
        self._token, self._token_age = "", 0.0

    @classmethod
    def from_login(cls, url: str, login: Path) -> Self:
        """A client with the first user of a log-in file, a JSON object user -> password.

        Raises ConfigError where the file is missing or is something else.
        """
        try:
            user, password = next(iter(json.loads(login.read_text(encoding="utf-8")).items()))
        except (OSError, ValueError, AttributeError, StopIteration) as error:
            raise ConfigError(
                f"log-in file {login}: no JSON object user -> password ({type(error).__name__})"
            ) from None
        return cls(url, user=str(user), password=str(password))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def dag(self, dag_id: str) -> Dag | None:
        """The DAG; None while Airflow has not read its file yet."""
        response = self._send("GET", _path("dags", dag_id), missing_ok=True)
        if response is None:
            return None
        plain = response.json()
        return Dag(
            dag_id=plain["dag_id"],
            is_paused=bool(plain["is_paused"]),
            has_import_errors=bool(plain.get("has_import_errors")),
        )

    def set_paused(self, dag_id: str, paused: bool) -> None:
        self._send("PATCH", _path("dags", dag_id), body={"is_paused": paused}, repeatable=True)

    def import_errors(self) -> Mapping[str, str]:
        """File name -> traceback of every DAG file that Airflow could not read."""
        items = self._pages("/importErrors", "import_errors")
        return {str(item["filename"]): str(item["stack_trace"]) for item in items}

    def trigger(
        self, dag_id: str, conf: Mapping[str, Any], *, run_id: str | None = None, exist_ok: bool = False
    ) -> DagRun:
        """Start a run now; ``conf`` overrides the DAG's params and is checked against their schema.

        Without ``run_id`` the run gets a name of its own. With ``exist_ok`` a run of that name is the answer
        if it exists already. Both make it safe to ask again when an answer is lost. Raises AirflowConflict
        for a name that is taken.
        """
        exist_ok |= run_id is None
        name = run_id or f"manual__{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}__{uuid.uuid4().hex[:8]}"
        body = {"logical_date": None, "conf": dict(conf), "dag_run_id": name}
        try:
            answer = self._json("POST", _path("dags", dag_id, "dagRuns"), body=body, repeatable=exist_ok)
        except AirflowConflict:
            if not exist_ok:
                raise
            return self.dag_run(dag_id, name)
        return _dag_run(answer)

    def dag_run(self, dag_id: str, run_id: str) -> DagRun:
        return _dag_run(self._json("GET", _path("dags", dag_id, "dagRuns", run_id)))

    def dag_runs(self, dag_id: str) -> tuple[DagRun, ...]:
        """All runs of a DAG, oldest first."""
        items = self._pages(_path("dags", dag_id, "dagRuns"), "dag_runs", order_by="run_after")
        return tuple(_dag_run(item) for item in items)

    def task_instances(self, dag_id: str, run_id: str) -> tuple[TaskInstance, ...]:
        items = self._pages(_path("dags", dag_id, "dagRuns", run_id, "taskInstances"), "task_instances")
        return tuple(_task_instance(item) for item in items)

    def task_instance(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1
    ) -> TaskInstance | None:
        """The newest try of a task; None if Airflow has no such task instance."""
        path = _path("dags", dag_id, "dagRuns", run_id, "taskInstances", task_id, *_mapped(map_index))
        response = self._send("GET", path, missing_ok=True)
        return None if response is None else _task_instance(response.json())

    def find_task_instances(
        self, *, dag_ids: Iterable[str], run_ids: Iterable[str], task_ids: Iterable[str]
    ) -> tuple[TaskInstance, ...]:
        """Every task instance whose DAG, run and task are all among the given ones; few calls for many."""
        body = {"dag_ids": list(dag_ids), "dag_run_ids": list(run_ids), "task_ids": list(task_ids)}
        items: list[dict[str, Any]] = []
        while True:
            page = {"page_offset": len(items), "page_limit": PAGE_SIZE, "order_by": "id"}
            answer = self._json(
                "POST",
                _path("dags", "~", "dagRuns", "~", "taskInstances", "list"),
                body=body | page,
                repeatable=True,
            )
            items += answer["task_instances"]
            if not answer["task_instances"] or len(items) >= answer["total_entries"]:
                return tuple(_task_instance(item) for item in items)

    def log(self, dag_id: str, run_id: str, task_id: str, *, try_number: int, map_index: int = -1) -> str:
        """What the task's log page shows for one try, one event a line, errors with their traceback."""
        path = _path("dags", dag_id, "dagRuns", run_id, "taskInstances", task_id, "logs", str(try_number))
        query: dict[str, Any] = {"map_index": map_index, "full_content": True}
        lines: list[str] = []
        while True:
            page = self._json("GET", path, query=query)
            lines += [_log_line(item) for item in page["content"]]
            token = page.get("continuation_token")
            if not token or not page["content"]:
                return "\n".join(lines)
            query["token"] = token

    def set_state(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        state: Literal["failed", "success"],
        *,
        map_index: int = -1,
    ) -> None:
        """Mark a task failed or success, as the buttons of the UI do."""
        path = _path("dags", dag_id, "dagRuns", run_id, "taskInstances", task_id, *_mapped(map_index))
        self._send("PATCH", path, body={"new_state": state})

    def clear(self, dag_id: str, run_id: str, task_ids: Iterable[str]) -> None:
        """Clear tasks of a run, so that they run again."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": list(task_ids),
            "only_failed": False,
            "reset_dag_runs": True,
        }
        self._send("POST", _path("dags", dag_id, "clearTaskInstances"), body=body)

    def get(self, path: str, **query: Any) -> Any:
        """Any other reading call under ``/api/v2``, as plain JSON."""
        return self._json("GET", path, query=query)

    def _pages(self, path: str, key: str, **query: Any) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        while True:
            page = self._json("GET", path, query={**query, "limit": PAGE_SIZE, "offset": len(items)})
            items += page[key]
            if not page[key] or len(items) >= page["total_entries"]:
                return items

    def _json(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        repeatable: bool = False,
    ) -> dict[str, Any]:
        response = self._send(method, path, body=body, query=query, repeatable=repeatable)
        assert response is not None
        try:
            plain = response.json()
        except ValueError:
            plain = None
        if not isinstance(plain, dict):
            raise AirflowApiError(
                f"{method} {path}: no JSON object in the answer; is {self.url} really Airflow's API?"
            )
        return plain

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        missing_ok: bool = False,
        repeatable: bool = False,
    ) -> httpx.Response | None:
        attempts = _attempts(repeatable=repeatable or method == "GET")
        try:
            response = attempts(self._once, method, path, body, query)
            if response.status_code == httpx.codes.UNAUTHORIZED:
                self._token = ""
                response = attempts(self._once, method, path, body, query)
        except httpx.TransportError as error:
            raise AirflowUnavailable(f"{self.url}: {type(error).__name__}: {error}") from None
        if missing_ok and response.status_code == httpx.codes.NOT_FOUND:
            return None
        if not response.is_success:
            raise _refusal(response)(f"{method} {path}: {response.status_code}: {_detail(response)}")
        return response

    def _once(self, method: str, path: str, body: Any, query: Mapping[str, Any] | None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._fresh_token()}", "Accept": "application/json"}
        return self._client.request(method, API + path, json=body, params=query, headers=headers)

    def _fresh_token(self) -> str:
        if not self._token or time.monotonic() - self._token_age > TOKEN_AGE_S:
            answer = self._client.post(
                "/auth/token", json={"username": self._user, "password": self._password}
            )
            if not answer.is_success:
                raise _refusal(answer)(f"log-in as {self._user!r}: {answer.status_code}: {_detail(answer)}")
            self._token, self._token_age = str(answer.json()["access_token"]), time.monotonic()
        return self._token


def _attempts(*, repeatable: bool) -> Retrying:
    """Repeats what is safe to repeat; in the end the last answer or error is the caller's."""
    lost = retry_if_exception_type(httpx.TransportError if repeatable else httpx.ConnectError)
    broken = retry_if_result(lambda response: repeatable and response.is_server_error)
    return Retrying(
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(multiplier=0.2, max=3),
        retry=lost | broken,
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )


def _refusal(response: httpx.Response) -> type[AirflowApiError]:
    if response.is_server_error:
        return AirflowUnavailable
    return AirflowConflict if response.status_code == httpx.codes.CONFLICT else AirflowApiError


def _path(*parts: str) -> str:
    return "/" + "/".join(quote(part, safe="") for part in parts)


def _mapped(map_index: int) -> tuple[str, ...]:
    return () if map_index < 0 else (str(map_index),)


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _dag_run(plain: Mapping[str, Any]) -> DagRun:
    return DagRun(
        dag_id=plain["dag_id"],
        run_id=plain["dag_run_id"],
        state=plain["state"],
        started=_time(plain["start_date"]),
        ended=_time(plain["end_date"]),
        conf=plain["conf"] or {},
    )


def _task_instance(plain: Mapping[str, Any]) -> TaskInstance:
    return TaskInstance(
        dag_id=plain["dag_id"],
        run_id=plain["dag_run_id"],
        task_id=plain["task_id"],
        map_index=plain["map_index"],
        state=plain["state"],
        try_number=plain["try_number"],
        started=_time(plain["start_date"]),
        ended=_time(plain["end_date"]),
    )


def _log_line(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    parts = [str(item.get("event", ""))]
    if item.get("error_detail"):
        parts.append(json.dumps(item["error_detail"]))
    return "\n".join(parts)
