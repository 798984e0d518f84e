"""The reporter in a process of its own, so that what MLflow's client does takes no turns from the training.

Threads of one Python process share one lock, and a training gives it up at each of its operations: while
another thread imports mlflow, which takes a second, or makes up a request, the training gets it back only
after the interpreter's switch interval, 5 ms, each time. A process shares nothing but the cores.

A process that begins while torch's threads run must not be a fork, so this one is a program,
:mod:`pollux_agent.report.sender`: it reads what to report from its standard input, a JSON array a line,
answers on its standard output, and the close with its exit status.
"""

import base64
import json
import logging
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Report, decode, encode
from pollux_agent.report.base import RunStatus
from pollux_agent.report.outbox import Point
from pollux_agent.report.prior import Earlier
from pollux_agent.report.unsent import keep_unsent, read_unsent

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-P", "-m", "pollux_agent.report.sender")
"""``-P``: the script's folder may hold files named like modules."""

_MAX_WAITING = 100_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_GRACE_S = 3.0


class ReporterApart:
    """A :class:`MlflowReporter` in a process that starts with the first thing to send, and ends with the
    close or with this process. One that somebody kills is started again, and what it held is lost.
    """

    def __init__(
        self, tracking_uri: str, run_id: str, incarnation: int, *, unsent: Path | None = None
    ) -> None:
        self._opening = _line(tracking_uri, run_id, incarnation, None if unsent is None else str(unsent))
        self._unsent = unsent
        self._early: deque[Point] | None = deque(maxlen=_MAX_WAITING)
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="pollux-report", daemon=True)
        self._answers: threading.Thread | None = None
        self._give: Callable[[Earlier], None] = _nobody
        self._started = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = self._is_full = False

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        numbers = {name: _number(value) for name, value in values.items()}
        now_ms = int(time.time() * 1000)
        early = self._early
        if early is not None and not self._closed:
            early.extend(
                Point(name, number, int(step), now_ms)
                for name, number in numbers.items()
                if math.isfinite(number)
            )
        self._put("metrics", numbers, int(step), now_ms)

    def report(self, report: Report) -> None:
        try:
            text = encode(report)
        except ValueError as error:
            logger.error("report %d is not sent: %s", report.sequence, error)
            return
        self._put("report", text)

    def artifact(self, name: str, data: bytes) -> None:
        self._put("artifact", name, base64.b64encode(data).decode())

    def ask_for_earlier(self, give: Callable[[Earlier], None]) -> None:
        self._give = give
        self._put("earlier")

    def finish(self, status: RunStatus) -> None:
        self._put("finish", status)

    def close(self, timeout_s: float = 10.0) -> bool:
        if self._thread.ident is None:
            return True
        until_s = time.monotonic() + timeout_s + _GRACE_S
        self._put("close", timeout_s)
        self._closed = True
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_GRACE_S)
        self._thread.join(max(0.0, until_s - time.monotonic()))
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        if self._answers is not None:
            self._answers.join(_GRACE_S)
        if self._early is not None:
            self._keep(tuple(self._early))
        return process is not None and process.returncode == 0

    def _keep(self, points: tuple[Point, ...]) -> None:
        """The process has not come to read them, so that they are kept from here."""
        if self._unsent is None:
            return
        try:
            keep_unsent(self._unsent, (*read_unsent(self._unsent), *points))
        except OSError as error:
            logger.warning("%d figures that MLflow has not taken are lost: %s", len(points), error)

    def _put(self, *message: Any) -> None:
        if self._closed:
            return
        with self._started:
            if self._thread.ident is None:
                self._thread.start()
        try:
            self._waiting.put_nowait(_line(*message))
            self._is_full = False
        except queue.Full:
            if not self._is_full:
                logger.warning("the process that reports to MLflow does not read; what is new is dropped")
            self._is_full = True

    def _work(self) -> None:
        """Hand over line by line."""
        pause_s = _FIRST_PAUSE_S
        while (line := self._waiting.get()) is not None:
            while not self._handed_over(line):
                if self._closed:
                    return
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
            self._process.wait()

    def _handed_over(self, line: bytes) -> bool:
        try:
            if self._process is None or self._process.poll() is not None:
                if self._process is not None:
                    logger.warning(
                        "the process that reports to MLflow ended with status %d; it is started again",
                        self._process.returncode,
                    )
                command = (*_COMMAND, str(os.getpid()))
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._answers = threading.Thread(
                    target=self._listen, args=(self._process.stdout,), name="pollux-answers", daemon=True
                )
                self._answers.start()
                self._write(self._opening)
            self._write(line)
        except OSError as error:
            logger.warning("nothing is reported to MLflow for now: %s", error)
            return False
        return True

    def _listen(self, answers: IO[bytes]) -> None:
        """Until the process ends. An empty line says that it keeps what it cannot send, from then on."""
        with answers:
            for line in answers:
                if not line.strip():
                    self._early = None
                    continue
                with suppress(DocumentError):  # a line that its end has cut off
                    self._give(decode(Earlier, line))

    def _write(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()


def _line(*message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _nobody(_: Earlier) -> None:
    """Who is given what was not asked for."""


def _number(value: object) -> float:
    """The value as a number, NaN for what is none, which is counted and not logged."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return float("nan")
