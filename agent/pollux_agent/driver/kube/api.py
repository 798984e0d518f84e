"""A small client of the Kubernetes API: plain JSON values in and out, paged lists, bounded retries.

The kubernetes package does what is hard (kubeconfigs, tokens, TLS); its models are left out, since they
take most of the time of a large list. Every answer that is not a success is raised as a :class:`KubeError`.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3
from kubernetes import client as kube_client
from kubernetes import config as kube_config

from pollux_agent.errors import PolluxAgentError

Json = Mapping[str, Any]
PAGE_SIZE = 500
FIELD_MANAGER = "pollux"

_CONNECT_S = 5.0
_READ_S = 30.0
_TRIES = 4
_PAUSE_S = 0.3
_MAX_PAUSE_S = 5.0
_BUSY = frozenset({429, 500, 502, 503, 504})
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class KubeError(PolluxAgentError):
    """The API server refused a request; ``status`` is its HTTP status, 0 if it did not answer."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    @property
    def unavailable(self) -> bool:
        """Whether the same request may work later."""
        return self.status == 0 or self.status in _BUSY


@dataclass(slots=True)
class KubeApi:
    """The API server behind ``client``; ``num_calls`` counts the requests so far. Threads may share it."""

    client: kube_client.ApiClient
    read_s: float = _READ_S
    num_calls: int = field(default=0, init=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False)
    server_unix_s: float = field(default=0.0, init=False)
    """The server's clock when it answered last, to the second; 0 before it did."""

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        return self._json("GET", path, query)

    def items(self, path: str, *, accept: str = "", **query: Any) -> Iterator[dict[str, Any]]:
        """All items of a list, page by page; a list that expired half-way starts over, once."""
        for attempt in (1, 2):
            try:
                yield from [item for page in self._pages(path, accept, query) for item in page]
            except KubeError as error:
                if error.status != 410 or attempt == 2:
                    raise
            else:
                return

    def list_with_version(self, path: str, **query: Any) -> tuple[list[dict[str, Any]], str]:
        """All items of a list in one answer, and the version from which a watch goes on."""
        answer = self._json("GET", path, query)
        return list(answer.get("items") or ()), str(answer["metadata"]["resourceVersion"])

    def create(self, path: str, body: Json, **query: Any) -> dict[str, Any]:
        return self._json("POST", path, query | {"fieldManager": FIELD_MANAGER}, body=body)

    def replace(self, path: str, body: Json) -> dict[str, Any]:
        """Replace an object; a resourceVersion in ``body`` makes that conditional (409 otherwise)."""
        return self._json("PUT", path, {"fieldManager": FIELD_MANAGER}, body=body)

    def patch(self, path: str, body: Json | Sequence[Json]) -> dict[str, Any]:
        """A JSON patch if ``body`` is a list, else a merge patch."""
        kind = "merge-patch" if isinstance(body, Mapping) else "json-patch"
        query = {"fieldManager": FIELD_MANAGER}
        return self._json("PATCH", path, query, body=body, content=f"application/{kind}+json")

    def delete(self, path: str, *, grace_s: float | None = None, uid: str = "") -> None:
        """Delete an object (the one with that ``uid``); one that is gone already is no error."""
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1"}
        options["propagationPolicy"] = "Background"
        if grace_s is not None:
            options["gracePeriodSeconds"] = max(0, round(grace_s))
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            self._json("DELETE", path, {}, body=options)
        except KubeError as error:
            if error.status != 404 and not (uid and error.status == 409):
                raise

    def watch(self, path: str, *, version: str, timeout_s: float, **query: Any) -> Iterator[dict[str, Any]]:
        """Events (``type``, ``object``) until the server ends the watch; raises KubeError 410 if too old."""
        query |= {"watch": "true", "resourceVersion": version, "timeoutSeconds": max(1, round(timeout_s))}
        answer = self._request("GET", path, query, read_s=timeout_s + 10)
        try:
            for line in _lines(answer):
                event = json.loads(line)
                if event.get("type") == "ERROR":
                    raise _error_of(event.get("object") or {}, f"GET {path} (watch)")
                yield event
        finally:
            answer.close()
            answer.release_conn()

    def text(self, path: str, *, read_s: float | None = None, **query: Any) -> bytes:
        """A body that is no JSON, such as a log."""
        answer = self._request("GET", path, query, read_s=read_s)
        return bytes(answer.data)

    def stream(self, path: str, *, read_s: float, **query: Any) -> urllib3.BaseHTTPResponse:
        """An open answer whose body the caller reads and closes."""
        return self._request("GET", path, query, read_s=read_s)

    def _pages(self, path: str, accept: str, query: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
        token = ""
        while True:
            page = {**query, "limit": PAGE_SIZE} | ({"continue": token} if token else {})
            answer = self._json("GET", path, page, accept=accept)
            yield list(answer.get("items") or ())
            token = (answer.get("metadata") or {}).get("continue") or ""
            if not token:
                return

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        *,
        body: Json | Sequence[Json] | None = None,
        content: str = "application/json",
        accept: str = "",
    ) -> dict[str, Any]:
        answer = self._request(method, path, query, body=body, content=content, accept=accept)
        try:
            found = json.loads(answer.data)
        except ValueError:
            raise KubeError(f"{method} {path} was answered with something that is no JSON") from None
        return found if isinstance(found, dict) else {}

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        *,
        body: Json | Sequence[Json] | None = None,
        content: str = "application/json",
        accept: str = "",
        read_s: float | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """One request; again only if the server says that it is busy, or a GET got no answer."""
        pause_s = _PAUSE_S
        for attempt in range(1, _TRIES + 1):
            try:
                return self._once(method, path, query, body, content, accept, read_s)
            except KubeError as error:
                again = error.status == 429 or (error.unavailable and method == "GET")
                if not again or attempt == _TRIES:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        raise AssertionError("unreachable")

    def _once(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Json | Sequence[Json] | None,
        content: str,
        accept: str,
        read_s: float | None,
    ) -> urllib3.BaseHTTPResponse:
        what = f"{method} {path}"
        with self._counting:
            self.num_calls += 1
        try:
            answer = self.client.call_api(
                path,
                method,
                query_params=[(name, value) for name, value in query.items() if value not in ("", None)],
                header_params={"Accept": accept or "application/json", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=(_CONNECT_S, self.read_s if read_s is None else read_s),
            )
        except kube_client.ApiException as error:
            self._note_time(error.headers)
            raise _explain(error, what) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise KubeError(f"{what}: the API server does not answer: {_short(error)}") from None
        self._note_time(answer.headers)
        return answer  # type: ignore[no-any-return]

    def _note_time(self, headers: Mapping[str, str] | None) -> None:
        """Every answer tells the time, a refusal too."""
        if date := (headers or {}).get("Date"):
            self.server_unix_s = parsedate_to_datetime(date).timestamp()


def open_api(kubeconfig: Path | None = None, context: str = "") -> KubeApi:
    """The API that ``kubeconfig`` leads to; without one, from inside a pod its own cluster's, else the
    user's kubeconfig. Raises KubeError where there is none.
    """
    configuration = kube_client.Configuration()
    try:
        if kubeconfig is None and _SERVICE_ACCOUNT.exists():
            kube_config.load_incluster_config(client_configuration=configuration)
        else:
            kube_config.load_kube_config(
                config_file=None if kubeconfig is None else str(kubeconfig),
                context=context or None,
                client_configuration=configuration,
            )
    except (kube_config.ConfigException, OSError) as error:
        where = kubeconfig or "the default places"
        raise KubeError(f"no way to a cluster in {where}: {error}; name a kubeconfig") from None
    configuration.retries = 0  # KubeApi tries again itself, where that does nothing twice
    return KubeApi(kube_client.ApiClient(configuration))


def pod_path(namespace: str, name: str = "", part: str = "") -> str:
    """Path of a namespace's pods, of one of them, or of a part of it such as its log."""
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
    if name:
        path += f"/{quote(name, safe='')}"
    return f"{path}/{part}" if part else path


def _lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    rest = b""
    try:
        for chunk in answer.stream(65_536):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line for line in lines if line.strip())
    except (urllib3.exceptions.HTTPError, OSError):
        return  # a watch that is cut goes on from its last version


def _explain(error: kube_client.ApiException, what: str) -> KubeError:
    if not error.status:
        return KubeError(f"{what}: the API server does not answer: {error.reason}")
    try:
        status = json.loads(error.body or "{}")
    except ValueError:
        status = {}
    plain = status if isinstance(status, dict) else {}
    return _error_of({"code": error.status, "message": error.reason} | plain, what)


def _error_of(status: Json, what: str) -> KubeError:
    code = int(status.get("code") or 0)
    message = str(status.get("message") or "no cause was given")[:1_000]
    return KubeError(f"{what} was answered with {code}: {message}", code, str(status.get("reason") or ""))


def _short(error: BaseException) -> str:
    return (str(error) or repr(error))[:300]
