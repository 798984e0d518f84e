"""Follows what worker pods print: into the job's folder, and to our own output, so that one log tells all."""

import logging
import sys
import threading
from pathlib import Path

import urllib3

from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 * 1024 * 1024
_MAX_LINE_BYTES = 64 * 1024
_RETRY_S, _MOST_S = 0.5, 15.0
_READ_S = 3_600.0
_OUT = threading.Lock()


class LogFollower:
    """Copies one pod's output until the pod is gone, or ended and read to its end. Lines come once each."""

    def __init__(
        self, api: KubeApi, namespace: str, pod: str, path: Path, mark: str, *, container: str = ""
    ) -> None:
        self._api, self._container = api, container
        self._pod_path = pod_path(namespace, pod)
        self._path = path
        self._mark = mark
        self._last = ""
        self._written = 0
        self._pause_s = _RETRY_S
        self._refused = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"log {pod}", daemon=True)

    def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def close(self, wait_s: float) -> None:
        """The pod has ended: read what is left of its output, but for no longer than ``wait_s``."""
        self._closed.set()
        self._thread.join(wait_s)

    @property
    def is_empty(self) -> bool:
        """Whether not a line has come yet."""
        return self._written == 0

    def note(self, text: str) -> None:
        """A line of our own among the pod's."""
        self._write(f"[pollux] {text}".encode())

    def _run(self) -> None:
        while True:
            ended = self._closed.is_set()
            try:
                self._copy()
            except KubeError as error:
                if error.status == 404:
                    return
                if error.status == 403:
                    self.note(f"the workers' output cannot be read: {error}")
                    return
            except (urllib3.exceptions.HTTPError, OSError) as error:
                logger.info("The log of %s was cut: %s", self._pod_path, error)
            if ended:
                return
            self._closed.wait(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MOST_S)

    def _copy(self) -> None:
        """What was printed since the last line; follows until the container ends."""
        query = {
            "timestamps": "true",
            "follow": "true",
            "sinceTime": self._last,
            "container": self._container,
        }
        answer = self._api.stream(f"{self._pod_path}/log", read_s=_READ_S, **query)
        rest = b""
        try:
            for chunk in answer.stream(65_536):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
                if len(rest) > _MAX_LINE_BYTES:
                    self._take(rest)
                    rest = b""
            if rest:
                self._take(rest)
        finally:
            answer.close()
            answer.release_conn()

    def _take(self, line: bytes) -> None:
        stamp, _, text = line.partition(b" ")
        when = stamp.decode(errors="replace")
        if when <= self._last or not when[:1].isdigit():  # the kubelet's own complaints carry no time
            return
        self._last, self._pause_s = when, _RETRY_S
        self._write(text[:_MAX_LINE_BYTES])

    def _write(self, text: bytes) -> None:
        if self._written > MAX_LOG_BYTES:
            return
        self._written += len(text) + 1
        if self._written > MAX_LOG_BYTES:
            text = b"[pollux] this log is full; what the workers print from here on is dropped"
        try:
            with self._path.open("ab") as file:
                file.write(text + b"\n")
            self._refused = False
        except (
            OSError
        ) as error:  # the folder is full or away, and what the workers print goes on to our output
            if not self._refused:
                logger.warning("%s is not written for now: %s", self._path, error)
            self._refused = True
        with _OUT:
            sys.stdout.write(f"[{self._mark}] {text.decode(errors='replace')}\n")
            sys.stdout.flush()
