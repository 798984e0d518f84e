"""Services of a running stack: found, killed, and made to do nothing for a while."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pollux.stack.processes import ProcessId, members, send, wait_until
from pollux.stack.record import read_record

_WAIT_S = 90.0


def service(state: Path, name: str) -> tuple[ProcessId, int]:
    """The main process of a service that is ready, and how often it was restarted."""
    found: list[tuple[ProcessId, int]] = []

    def ready() -> bool:
        record = read_record(state)
        part = record.components[name] if record else None
        if part is not None and part.ready and part.process is not None:
            found.append((part.process, part.restarts))
        return bool(found)

    assert wait_until(ready, _WAIT_S), f"{name} is not ready"
    return found[0]


def kill_services(state: Path, *names: str) -> None:
    """SIGKILL their main processes, and wait until the supervisor has started each again."""
    before = {name: service(state, name) for name in names}
    for process, _ in before.values():
        assert send(process, signal.SIGKILL)

    def again(name: str) -> bool:
        record = read_record(state)
        return record is not None and record.components[name].restarts > before[name][1]

    for name in names:
        assert wait_until(lambda name=name: again(name), _WAIT_S), f"{name} is not started again"
        service(state, name)


@contextmanager
def frozen(state: Path, name: str) -> Iterator[None]:
    """All processes of a service do nothing for the time of the block."""
    leader, _ = service(state, name)
    processes = members((leader,), mark="")
    for process in processes:
        send(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            send(process, signal.SIGCONT)
