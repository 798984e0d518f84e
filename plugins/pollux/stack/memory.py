"""Memory of a whole stack: the sum of PSS, in which a page shared by n processes counts 1/n in each."""

import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from pollux.errors import PolluxError
from pollux.stack.processes import ProcessId, members
from pollux.stack.record import StackRecord, read_record

SAMPLE_INTERVAL = timedelta(seconds=5)


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process; 0 if it is gone or is not ours to read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def stack_processes(record: StackRecord) -> tuple[ProcessId, ...]:
    """Every process of the stack: services, workers of the local cluster, supervisor and guard."""
    helpers = tuple(process for process in (record.supervisor, record.guard) if process is not None)
    return tuple(dict.fromkeys((*helpers, *members(record.leaders, record.mark))))


def total_bytes(processes: Iterable[ProcessId]) -> int:
    """Sum of their PSS."""
    return sum(pss_bytes(process.pid) for process in processes)


class MemorySampler:
    """Follows a stack's memory in a thread for the time of a ``with`` block; read ``peak_bytes``."""

    def __init__(self, state: Path, interval: timedelta = SAMPLE_INTERVAL) -> None:
        self._state = state
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self.peak_bytes = 0
        self.samples = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                record = read_record(self._state)
            except PolluxError:
                record = None
            if record is not None:
                self.peak_bytes = max(self.peak_bytes, total_bytes(stack_processes(record)))
                self.samples += 1
            if self._done.wait(self._interval.total_seconds()):
                return
