"""The reporter in a process of its own, so that what MLflow's client does takes no turns from the training.

Threads of one Python process share one lock, and a training gives it up at each of its operations: while
another thread imports mlflow, which takes a second, or makes up a request, the training gets it back only
after the interpreter's switch interval, 5 ms, each time. A process shares nothing but the cores.

A process that begins while torch's threads run must not be a fork, so this one is a program,
:mod:`pollux_agent.report.sender`: it reads what to report from its standard input, a JSON array a line,
answers on its standard output, and the close with its exit status. Each line with metrics is kept here until
it says that their points have arrived, so that its end, by whatever, loses none.
"""

import base64
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pollux_agent.protocol import Report, decode
from pollux_agent.report.base import RunStatus
from pollux_agent.report.outbox import Point
from pollux_agent.report.prior import Earlier
from pollux_agent.report.reporter import number_of, points_of, text_of
from pollux_agent.report.unsent import LEFT, keep_unsent, read_unsent

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-P", "-m", "pollux_agent.report.sender")
"""``-P``: the script's folder may hold files named like modules."""

_MAX_WAITING = 100_000
_AGAIN = frozenset({"report", "earlier", "finish", "close"})
"""Of these the latest is said again to a process that is started again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_GRACE_S = 3.0


class ReporterApart:
    """A :class:`MlflowReporter` in a process that starts with the first thing to send, and ends with the
    close or with this process. One that somebody kills is started again, and is told once more what it has
    not acknowledged: the latest 100 000 calls of ``metrics``, and the latest report; files are not kept.
    Figures that wait when it does not end by itself go to the file ``unsent``.
    """

    def __init__(
        self, tracking_uri: str, run_id: str, incarnation: int, *, unsent: Path | None = None
    ) -> None:
        self._opening = (tracking_uri, run_id, incarnation, None if unsent is None else str(unsent))
        self._unsent = unsent
        self._waiting: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="pollux-report", daemon=True)
        self._answers: threading.Thread | None = None
        self._give: Callable[[Earlier], None] = _nobody
        self._started = threading.Lock()
        self._closing, self._over = threading.Event(), threading.Event()
        self._is_full = False
        self._pause_s = 0.0
        self._life = threading.Lock()
        """Held to change what follows, which belongs to the process that lives now."""
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: deque[bytes] = deque(maxlen=_MAX_WAITING)
        self._num_told = self._num_nonfinite = 0
        self._again: dict[str, bytes] = {}

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        numbers = {name: number_of(value) for name, value in values.items()}
        self._put("metrics", numbers, int(step), int(time.time() * 1000))

    def report(self, report: Report) -> None:
        text = text_of(report)
        if text is not None:
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
        self._closing.set()
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_GRACE_S)
        self._thread.join(max(0.0, until_s - time.monotonic()))
        with self._life:  # from here on no process is started
            self._over.set()
            process = self._process
        if process is not None and process.poll() is None:
            logger.warning("the process that reports to MLflow has not ended in time, so it is killed")
            process.kill()
            process.wait()
        for thread in (self._thread, self._answers):
            if thread is not None:
                thread.join(_GRACE_S)
        status = None if process is None else process.returncode
        if status not in (0, LEFT):
            self._keep(self._points_left())
        return status == 0

    def _points_left(self) -> list[Point]:
        """What no process has acknowledged, in order, once none lives."""
        with self._life:
            lines, num_nonfinite = list(self._kept), self._num_nonfinite
        with suppress(queue.Empty):
            while True:
                item = self._waiting.get_nowait()
                if item is not None and item[0] == "metrics":
                    lines.append(item[1])
        points: list[Point] = []
        for line in lines:
            _, values, step, time_ms = json.loads(line)
            new, num_nonfinite = points_of(values, step, time_ms, num_nonfinite)
            points += new
        return points

    def _keep(self, points: Sequence[Point]) -> None:
        """In the file, where the process may have left some of them; a point that arrived stays one."""
        if not points:
            return
        if self._unsent is None:
            logger.warning("up to %d figures that MLflow has not taken are lost", len(points))
            return
        try:
            keep_unsent(self._unsent, tuple(dict.fromkeys((*read_unsent(self._unsent), *points))))
        except OSError as error:
            logger.warning("up to %d figures that MLflow has not taken are lost: %s", len(points), error)

    def _put(self, *message: Any) -> None:
        if self._closing.is_set():
            return
        with self._started:
            if self._thread.ident is None:
                self._thread.start()
        try:
            self._waiting.put_nowait((message[0], _line(*message)))
            self._is_full = False
        except queue.Full:
            if not self._is_full:
                logger.warning("the process that reports to MLflow does not read; what is new is dropped")
            self._is_full = True

    def _work(self) -> None:
        """Hand over line by line, and see to it that a process comes to the close."""
        while (item := self._waiting.get()) is not None:
            kind, line = item
            self._remember(kind, line)
            while not (self._handed_over(line) or self._begun_again(kind, line)):
                if self._over.is_set():
                    return
        while (process := self._process) is not None and not self._over.is_set():
            self._hang_up(process)
            if process.wait() in (0, LEFT):
                return
            self._begun_again("close", b"")

    def _remember(self, kind: str, line: bytes) -> None:
        with self._life:
            if kind == "metrics":
                self._kept.append(line)
                self._num_told += 1
            elif kind in _AGAIN:
                self._again[kind] = line

    def _handed_over(self, line: bytes) -> bool:
        """Whether a process that lives has got the line."""
        process = self._process
        if process is None or process.poll() is not None:
            return False
        try:
            _write(process, line)
        except OSError:  # it has just ended
            process.kill()
            process.wait()
            return False
        return True

    def _begun_again(self, kind: str, line: bytes) -> bool:
        """Whether a new process has got all that waits, this line included."""
        last, status = self._process, None
        if last is not None:
            status = last.poll()
            self._hang_up(last)
        if self._answers is not None:
            self._answers.join(_GRACE_S)  # what it has acknowledged need not be sent again
        self._rest()
        try:
            begun = self._new_process()
            if begun is None:
                return False
            process, lines = begun
            if last is not None:
                logger.warning(
                    "the process that reports to MLflow ended with status %s; it is started again",
                    status,
                )
            for each in lines:
                _write(process, each)
            if kind == "artifact":
                _write(process, line)
        except OSError as error:
            logger.warning("nothing is reported to MLflow for now: %s", error)
            return False
        return True

    def _rest(self) -> None:
        """Before a process is started again soon, for longer each time; a close waits for less."""
        if self._closing.is_set():
            self._over.wait(min(self._pause_s, _FIRST_PAUSE_S))
        else:
            self._closing.wait(self._pause_s)
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    def _new_process(self) -> "tuple[subprocess.Popen[bytes], tuple[bytes, ...]] | None":
        """It, which lives from here on, and what to tell it; none once all is over. Raises OSError."""
        with self._life:
            if self._over.is_set():
                return None
            command = (*_COMMAND, str(os.getpid()))
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process = process
            self._num_told = len(self._kept)
            opening = _line(*self._opening, self._num_nonfinite)
            lines = (opening, *self._kept, *self._again.values())
        self._answers = threading.Thread(
            target=self._listen, args=(process,), name="pollux-answers", daemon=True
        )
        self._answers.start()
        return process, lines

    def _hang_up(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        """Until the process ends."""
        assert process.stdout is not None
        with process.stdout as answers:
            for line in answers:
                with suppress(ValueError):  # a line that its end has cut off
                    found = json.loads(line)
                    if isinstance(found, list):
                        self._let_go(process, *found)
                    else:
                        self._give(decode(Earlier, line))
                        self._again.pop("earlier", None)

    def _let_go(self, process: "subprocess.Popen[bytes]", num_delivered: int, num_nonfinite: int) -> None:
        """Forget the lines of this life that are delivered; others may have fallen out of the queue."""
        with self._life:
            if process is not self._process:
                return
            while len(self._kept) > self._num_told - num_delivered:
                self._kept.popleft()
            self._num_nonfinite = num_nonfinite
        self._pause_s = 0.0


def _write(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _line(*message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _nobody(_: Earlier) -> None:
    """Who is given what was not asked for."""
