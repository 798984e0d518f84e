"""The client of the local cluster: :class:`Cluster` and :class:`JobControl` over its Unix socket."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import httpx

from pollux.cluster.base import ClusterJob, ClusterView, JobIdentity, LogChunk, StopReason
from pollux.errors import ClusterError, ClusterUnavailable, Conflict, Refused, UnknownJob
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, JobSpec, Placement, decode, to_plain

logger = logging.getLogger(__name__)

_ERRORS: Mapping[int, type[ClusterError]] = {404: UnknownJob, 409: Conflict, 422: Refused, 400: Refused}
_MAX_SOCKET_PATH = 100
_TRIES = 3
_PAUSE_S = 0.2

GIVEN_UP_HEADER = "x-pollux-given-up-unix-s"
"""When nobody waits for the answer any more: a service that was hung does nothing of what it then finds."""

T = TypeVar("T")


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name of ``path`` that fits into a socket address, which holds some 100 bytes; Linux only."""
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """The local cluster behind ``socket``. Holds no connection, so it may be kept and shared for long."""

    socket: Path
    timeout: timedelta = timedelta(seconds=10)
    patches_at_once: ClassVar[int] = 1

    # --- Cluster

    @contextmanager
    def lease(self, holder: str, ttl: timedelta) -> Iterator[None]:
        self._call("POST", "/lease", {"holder": holder, "ttl_s": ttl.total_seconds()})
        try:
            yield
        finally:
            with suppress(ClusterUnavailable):
                self._call("DELETE", f"/lease?holder={quote(holder, safe='')}")

    def next_decision(self, above: int = 0) -> int:
        return int(self._call("POST", f"/decisions/next?above={above}").json()["decision"])

    def observe(self) -> ClusterView:
        return self._document(ClusterView, "GET", "/view")

    def patch_allocation(self, job_id: str, *, expected: int, allocation: Allocation) -> None:
        body = {"expected": expected, "allocation": to_plain(allocation)}
        self._call("PATCH", f"{_path(job_id)}/allocation", body)

    def set_run(self, job_id: str, run_id: str) -> None:
        self._call("PUT", f"{_path(job_id)}/run", {"mlflow_run_id": run_id})

    def held(self) -> Mapping[str, Placement]:
        held: Mapping[str, Placement] = self._call("GET", "/held").json()
        return held

    # --- JobControl

    def submit(
        self, job_id: str, *, identity: JobIdentity, spec: JobSpec, run_id: str | None, fresh: bool = False
    ) -> ClusterJob:
        body = {
            "identity": to_plain(identity),
            "spec": to_plain(spec),
            "mlflow_run_id": run_id,
            "fresh": fresh,
        }
        return self._document(ClusterJob, "PUT", _path(job_id), body)

    def job(self, job_id: str) -> ClusterJob:
        return self._document(ClusterJob, "GET", _path(job_id))

    def stop(self, job_id: str, reason: StopReason) -> ClusterJob:
        return self._document(ClusterJob, "POST", f"{_path(job_id)}/stop", {"reason": reason})

    def logs(self, job_id: str, cursor: str = "") -> LogChunk:
        return self._document(LogChunk, "GET", f"{_path(job_id)}/logs?cursor={quote(cursor, safe='')}")

    # --- more than the protocols ask for

    def every_job(self) -> ClusterView:
        """As :meth:`observe`, but with the jobs that are over."""
        return self._document(ClusterView, "GET", "/view?all=true")

    def health(self) -> Mapping[str, Any]:
        """The service's answer that it lives, with its process id; raises ClusterUnavailable."""
        answer: Mapping[str, Any] = self._call("GET", "/health").json()
        return answer

    def _document(self, kind: type[T], method: str, path: str, body: Mapping[str, Any] | None = None) -> T:
        answer = self._call(method, path, body)
        try:
            return decode(kind, answer.content)
        except DocumentError as error:
            raise ClusterError(f"local cluster {self.socket}: {method} {path}: {error}") from None

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """One request; tried again only where no connection could be made, so nothing is done twice.

        A Unix socket knows no TLS, and certificates take a tenth of a second to load each time.
        """
        for attempt in range(1, _TRIES + 1):
            try:
                with (
                    short_path(self.socket) as name,
                    httpx.HTTPTransport(uds=name, verify=False) as transport,
                ):
                    with httpx.Client(
                        transport=transport, base_url="http://local", timeout=self.timeout.total_seconds()
                    ) as client:
                        until = {GIVEN_UP_HEADER: f"{time.time() + self.timeout.total_seconds():.3f}"}
                        answer = client.request(method, path, json=body, headers=until)
                        return self._checked(answer, f"{method} {path}")
            except (httpx.ConnectError, FileNotFoundError) as error:
                if attempt == _TRIES:
                    raise ClusterUnavailable(
                        f"the local cluster does not answer on {self.socket} ({error}); if its service does "
                        f"not run, start it: pollux stack up --state {self.socket.parent}"
                    ) from None
                time.sleep(_PAUSE_S)
            except httpx.TimeoutException:
                raise ClusterUnavailable(
                    f"the local cluster does not answer on {self.socket} within "
                    f"{self.timeout.total_seconds():.0f} s ({method} {path}); its service hangs, or this "
                    "machine is very busy"
                ) from None
            except httpx.TransportError as error:
                raise ClusterUnavailable(f"local cluster {self.socket}: {method} {path}: {error!r}") from None
        raise AssertionError("unreachable")

    def _checked(self, answer: httpx.Response, what: str) -> httpx.Response:
        if answer.is_success:
            return answer
        try:
            message = str(answer.json()["error"])
        except (ValueError, KeyError, TypeError):
            message = answer.text[:200]
        kind = _ERRORS.get(answer.status_code)
        if kind is not None:
            raise kind(message)
        raise ClusterUnavailable(f"local cluster: {what} was answered with {answer.status_code}: {message}")


def _path(job_id: str) -> str:
    return f"/jobs/{quote(job_id, safe='')}"
