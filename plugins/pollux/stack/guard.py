"""The guard: a fork of the supervisor that outlives it and ends what a killed supervisor leaves."""

import contextlib
import os
import signal
from pathlib import Path

from pollux.errors import PolluxError
from pollux.stack.processes import ProcessId, end, identify, kill
from pollux.stack.record import read_record

GRACE_S = 10.0


def start_guard(state: Path) -> ProcessId:
    """Fork the guard of the stack in ``state``; call it before any thread exists.

    It waits for the end of the calling process, however that comes, and ends the services that
    ``stack.json`` names at that moment; after an orderly end it names none.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(writing)
            _watch(state, reading)
            code = 0
        finally:
            os._exit(code)
    os.close(reading)
    guard = identify(pid)
    assert guard is not None
    return guard


def _watch(state: Path, reading: int) -> None:
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(reading, 1):
        pass
    with contextlib.suppress(PolluxError):
        if record := read_record(state):
            end(dict.fromkeys(record.leaders, GRACE_S))
            kill(record.leaders, record.mark)
