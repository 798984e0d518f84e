"""The process that reports to MLflow what a training hands it: see :mod:`pollux_agent.report.apart`.

It answers with a JSON document a line: an object for what earlier runs know, and an array of two numbers, how
many of the lines with metrics that it has read need not be kept for it any more, since their points arrived
or never will, and how many values up to there were not finite.
"""

import base64
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pollux_agent.lifeline import name_process
from pollux_agent.protocol import Report, decode, encode
from pollux_agent.report.reporter import MlflowReporter
from pollux_agent.report.unsent import LEFT

PROCESS_NAME = "pollux-report"
"""What process lists call it."""

_LOOK_S = 1.0


class Progress:
    """How far the lines with metrics are read, and how far they are delivered."""

    def __init__(self, reporter: MlflowReporter) -> None:
        self._reporter = reporter
        self._read = self._marked = self._said = (0, reporter.num_nonfinite)
        self._is_delivered = reporter.watermark()

    def has_read_one(self) -> None:
        self._read = (self._read[0] + 1, self._reporter.num_nonfinite)

    def news(self) -> tuple[int, int] | None:
        """Lines that are delivered and values that were not finite in them, where that has changed."""
        if not self._is_delivered():
            return None
        delivered = self._marked
        self._marked = self._read  # before the mark: it may stand behind later points, not before these
        self._is_delivered = self._reporter.watermark()
        if self._is_delivered():
            delivered = self._marked
        if delivered == self._said:
            return None
        self._said = delivered
        return delivered


def serve(reporter: MlflowReporter, lines: Iterable[bytes], progress: Progress) -> int:
    """Report what the lines say until the close; the exit status. Without a close what waits is kept."""
    try:
        for line in lines:
            kind, *rest = json.loads(line)
            if kind == "metrics":
                values, step, time_ms = rest
                reporter.metrics(values, step, time_ms=time_ms)
                progress.has_read_one()
            elif kind == "report":
                reporter.report(decode(Report, rest[0]))
            elif kind == "artifact":
                reporter.artifact(rest[0], base64.b64decode(rest[1]))
            elif kind == "earlier":
                reporter.ask_for_earlier(lambda found: _answer(encode(found)))
            elif kind == "finish":
                reporter.finish(rest[0])
            else:
                return 0 if reporter.close(rest[0]) else LEFT
    except ValueError:  # a line that the training's end has cut off
        pass
    reporter.close(0.0)
    return LEFT


def _end_without(parent: int, reporter: MlflowReporter) -> None:
    """Keep what waits, and end, once the training is gone: a worker of its loader, which has inherited the
    pipe, may hold that open for longer.
    """
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    reporter.close(0.0)
    os._exit(LEFT)


def _tell(progress: Progress) -> None:
    while True:
        time.sleep(_LOOK_S)
        if news := progress.news():
            _answer(json.dumps(news))


_answering = threading.Lock()


def _answer(line: str) -> None:
    with _answering, suppress(OSError):  # the training is gone
        os.write(1, line.encode() + b"\n")


def main() -> None:
    """``python -m pollux_agent.report.sender PARENT``; ``PARENT`` is the training's process.

    A stop may be asked of all processes of a training, and this one waits for the training's word.
    """
    name_process(PROCESS_NAME)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    tracking_uri, run_id, incarnation, unsent, num_nonfinite = json.loads(sys.stdin.buffer.readline())
    reporter = MlflowReporter(
        tracking_uri,
        run_id,
        incarnation,
        unsent=None if unsent is None else Path(unsent),
        num_nonfinite=num_nonfinite,
    )
    progress = Progress(reporter)
    threading.Thread(target=_end_without, args=(int(sys.argv[1]), reporter), daemon=True).start()
    threading.Thread(target=_tell, args=(progress,), daemon=True).start()
    os._exit(serve(reporter, sys.stdin.buffer, progress))  # without waiting for a request that is under way


if __name__ == "__main__":
    main()
