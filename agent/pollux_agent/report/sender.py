"""The process that reports to MLflow what a training hands it: see :mod:`pollux_agent.report.apart`.

It answers with an empty line once it keeps what it cannot send, and with JSON for what earlier runs know.
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

PROCESS_NAME = "pollux-report"
"""What process lists call it."""

_LEFT = 3
"""Exit status where not all could be sent."""
_LOOK_S = 1.0


def serve(reporter: MlflowReporter, lines: Iterable[bytes]) -> int:
    """Report what the lines say until the close; the exit status. Without a close what waits is kept."""
    try:
        for line in lines:
            kind, *rest = json.loads(line)
            if kind == "metrics":
                values, step, time_ms = rest
                reporter.metrics(values, step, time_ms=time_ms)
            elif kind == "report":
                reporter.report(decode(Report, rest[0]))
            elif kind == "artifact":
                reporter.artifact(rest[0], base64.b64decode(rest[1]))
            elif kind == "earlier":
                reporter.ask_for_earlier(lambda found: _answer(encode(found)))
            elif kind == "finish":
                reporter.finish(rest[0])
            else:
                return 0 if reporter.close(rest[0]) else _LEFT
    except ValueError:  # a line that the training's end has cut off
        pass
    reporter.close(0.0)
    return _LEFT


def _end_without(parent: int, reporter: MlflowReporter) -> None:
    """Keep what waits, and end, once the training is gone: a worker of its loader, which has inherited the
    pipe, may hold that open for longer.
    """
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    reporter.close(0.0)
    os._exit(_LEFT)


def _answer(line: str) -> None:
    with suppress(OSError):  # the training is gone
        os.write(1, line.encode() + b"\n")


def main() -> None:
    """``python -m pollux_agent.report.sender PARENT``; ``PARENT`` is the training's process.

    A stop may be asked of all processes of a training, and this one waits for the training's word.
    """
    name_process(PROCESS_NAME)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    tracking_uri, run_id, incarnation, unsent = json.loads(sys.stdin.buffer.readline())
    reporter = MlflowReporter(
        tracking_uri, run_id, incarnation, unsent=None if unsent is None else Path(unsent)
    )
    _answer("")
    threading.Thread(target=_end_without, args=(int(sys.argv[1]), reporter), daemon=True).start()
    os._exit(serve(reporter, sys.stdin.buffer))  # without waiting for a request that is under way


if __name__ == "__main__":
    main()
