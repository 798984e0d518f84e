"""Processes by identity: a pid together with its start time, so that a re-used pid is never signalled."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux_agent.protocol import DOCUMENT_CONFIG

MARK_VARIABLE = "POLLUX_STACK_MARK"
"""Set for every process of a stack, to a value that no other stack has."""

POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class ProcessId:
    """A process for all time: ``started_ticks`` is its start in clock ticks since boot."""

    pid: Annotated[int, Field(ge=1)]
    started_ticks: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class ProcessInfo:
    """One line of the process table."""

    process: ProcessId
    parent: int
    session: int


def process_info(pid: int) -> ProcessInfo | None:
    """What the kernel says of ``pid``; None if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in ("Z", "X"):
        return None
    process = ProcessId(pid=pid, started_ticks=int(fields[19]))
    return ProcessInfo(process=process, parent=int(fields[1]), session=int(fields[3]))


def identify(pid: int) -> ProcessId | None:
    """The identity of ``pid`` now; None if it is gone or a zombie."""
    info = process_info(pid)
    return info.process if info else None


def is_alive(process: ProcessId) -> bool:
    """Whether that very process still runs."""
    return identify(process.pid) == process


def children(process: ProcessId, title: str) -> frozenset[ProcessId]:
    """Live children of that very process with ``title`` in their command line."""
    try:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        titled = [
            pid
            for pid in map(int, listed)
            if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        ]
    except OSError:
        return frozenset()
    return frozenset(found for pid in titled if (found := identify(pid)))


def this_boot() -> str:
    """Names this run of the machine or container: after the next, the same numbers are other processes."""
    first = identify(1)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{first.started_ticks if first else 0}"


def send(process: ProcessId, signum: signal.Signals) -> bool:
    """Signal that very process; False if it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Ask every tenth of a second; whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def members(leaders: Iterable[ProcessId], mark: str) -> tuple[ProcessId, ...]:
    """Every live process of a stack.

    These are the leaders, what runs in the session that a leader opened, all their descendants, and each
    process with ``mark`` in its environment: between them they also find a child whose parent is gone and
    one that opened a session of its own or overwrote its environment with a title.
    """
    table = [info for pid in _pids() if (info := process_info(pid))]
    by_pid = {info.process.pid: info.process for info in table}
    opened = {
        leader.pid: leader.started_ticks for leader in leaders if by_pid.get(leader.pid, leader) == leader
    }
    found = {
        info.process.pid
        for info in table
        if (info.session in opened and info.process.started_ticks >= opened[info.session])
        or _has_mark(info.process.pid, mark)
    }
    grew = True
    while grew:
        children = {info.process.pid for info in table if info.parent in found} - found
        found |= children
        grew = bool(children)
    return tuple(by_pid[pid] for pid in sorted(found - {os.getpid()}))


def end(graces_s: Mapping[ProcessId, float]) -> None:
    """Ask each leader to end; once its own grace is over, kill it with what runs in its session."""
    for leader in graces_s:
        send(leader, signal.SIGTERM)
    began_s = time.monotonic()
    left = dict(graces_s)
    while left:
        for leader, grace_s in tuple(left.items()):
            if not is_alive(leader) or time.monotonic() - began_s >= grace_s:
                del left[leader]
                kill((leader,), mark="")
        time.sleep(POLL_S if left else 0)


def kill(leaders: Iterable[ProcessId], mark: str, *, timeout_s: float = 10.0) -> bool:
    """Kill every member until none is left; whether that came about in time."""
    leaders = tuple(leaders)

    def all_gone() -> bool:
        left = members(leaders, mark)
        for process in left:
            send(process, signal.SIGKILL)
        return not left

    return wait_until(all_gone, timeout_s)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _has_mark(pid: int, mark: str) -> bool:
    if not mark:
        return False
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK_VARIABLE}={mark}".encode() in environ.split(b"\0")
