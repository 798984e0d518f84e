"""Start, follow, look at and stop a stack: what the command line, the demo and the tests use."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pollux.errors import ConfigError, StackError
from pollux.local.ports import is_free
from pollux.stack import tether
from pollux.stack.guard import GRACE_S
from pollux.stack.processes import ProcessId, is_alive, kill, send, wait_until
from pollux.stack.record import (
    StackPlan,
    StackRecord,
    make_state_folder,
    read_record,
    stack_lock,
    write_record,
)
from pollux.stack.services import log_path
from pollux.stack.supervisor import START_TIMEOUT_S
from pollux_agent.protocol import encode

Follower = Callable[[StackRecord], None]

SUPERVISOR_LOG = "stack"
POLL_S = 0.2
STOP_TIMEOUT_S = 90.0
TAIL_LINES = 15


def is_running(record: StackRecord | None) -> bool:
    """Whether the supervisor of that record is alive and not on its way out."""
    return record is not None and record.phase in ("starting", "ready") and is_alive(record.supervisor)


def up(
    plan: StackPlan,
    *,
    tethered: bool,
    follow: Follower | None = None,
    timeout_s: float = START_TIMEOUT_S + 60,
) -> StackRecord:
    """Make sure that the stack of ``plan.state`` runs; returns when it is ready.

    One that runs already, or that another call starts meanwhile, is left as it is. With ``tethered`` the
    stack ends when this process does. ``follow`` is called with each new state of the start. Raises
    ConfigError for a bad plan and StackError, with the end of the guilty log, when the stack does not start.
    """
    plan.check()
    plan = replace(
        plan,
        state=plan.state.absolute(),
        dags=plan.dags.absolute(),
        scripts=plan.scripts.absolute(),
        databases=plan.databases and plan.databases.absolute(),
    )
    make_state_folder(plan.state)
    record = read_record(plan.state)
    if not is_running(record):
        _await_end(plan.state, record)
        _check_ports(plan)
        child = _spawn(plan, tethered=tethered)
        try:
            return _follow(plan.state, child, follow, timeout_s)
        except BaseException:
            child.terminate()
            child.wait(STOP_TIMEOUT_S)
            record = read_record(plan.state)
            if record is not None and record.supervisor.pid == child.pid:
                _await_end(plan.state, record)
            raise
    return _follow(plan.state, None, follow, timeout_s)


def down(state: Path) -> bool:
    """End the stack in ``state``, also one whose supervisor is gone; False if none ran.

    Raises StackError where something could not be ended.
    """
    record = read_record(state)
    if record is None:
        return False
    ran = is_alive(record.supervisor) or any(is_alive(leader) for leader in record.leaders)
    send(record.supervisor, signal.SIGTERM)
    if not wait_until(lambda: not is_alive(record.supervisor), STOP_TIMEOUT_S):
        send(record.supervisor, signal.SIGKILL)
    _await_end(state, read_record(state))
    return ran


@contextmanager
def running_stack(plan: StackPlan, *, follow: Follower | None = None) -> Iterator[StackRecord]:
    """A stack for the time of the block; it ends with the block or with this process."""
    try:
        yield up(plan, tethered=True, follow=follow)
    finally:
        down(plan.state)


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, empty if there is none."""
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def _spawn(plan: StackPlan, *, tethered: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pollux.stack.supervisor", encode(plan)]
    if tethered:
        command = [sys.executable, "-IS", tether.__file__, str(os.getpid()), *command]
    log = log_path(plan.state, SUPERVISOR_LOG)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def _follow(
    state: Path, child: subprocess.Popen[bytes] | None, follow: Follower | None, timeout_s: float
) -> StackRecord:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended = child is not None and child.poll() is not None
        record = read_record(state)
        if child is not None and (record is None or record.supervisor.pid != child.pid):
            if ended and is_running(record):
                child, ended = None, False
            else:
                record = None
        if record is not None:
            if follow is not None:
                follow(record)
            if record.phase == "ready":
                return record
            if record.phase == "failed":
                raise StackError(_with_log(record.error, record))
            ended = ended or not is_alive(record.supervisor)
        if ended:
            log = log_path(state, SUPERVISOR_LOG)
            raise StackError(
                f"the supervisor ended before the stack was ready; {log} ends with:\n{tail(log)}"
            )
        time.sleep(POLL_S)
    raise StackError(f"{state}: the stack is not ready after {timeout_s:.0f} s; see {state / 'logs'}")


def _with_log(error: str, record: StackRecord) -> str:
    """The error with the end of the log that it names."""
    for component in record.components.values():
        if str(component.log) in error:
            return f"{error}\n{component.log.name} ends with:\n{tail(component.log)}"
    return error


def _check_ports(plan: StackPlan) -> None:
    for option, port in (("--airflow-port", plan.airflow_port), ("--mlflow-port", plan.mlflow_port)):
        if port is not None and not is_free(port):
            raise ConfigError(f"{option}: {port} is in use; name another or leave it out for a free one")


def _await_end(state: Path, record: StackRecord | None) -> None:
    """Wait for supervisor and guard of an earlier start, then end what is left of its processes."""
    if record is None:
        return
    helpers: tuple[ProcessId | None, ...] = (record.supervisor, record.guard)

    def gone() -> bool:
        return not any(process is not None and is_alive(process) for process in helpers)

    if not wait_until(gone, STOP_TIMEOUT_S + GRACE_S):
        raise StackError(f"{state}: the old supervisor (pid {record.supervisor.pid}) does not end; kill it")
    if not kill(record.leaders, record.mark):
        raise StackError(f"{state}: some processes of the old stack do not end; see `pollux stack status`")
    with stack_lock(state) as mine:
        if mine and record.phase != "failed":
            write_record(replace(record, phase="stopped", components={}, guard=None))
