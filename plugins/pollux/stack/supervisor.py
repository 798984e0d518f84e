"""The supervisor: starts the services, restarts what dies, and ends everything, whatever happens."""

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

from pollux.errors import StackError
from pollux.local.ports import free_port
from pollux.stack import tether
from pollux.stack.guard import start_guard
from pollux.stack.processes import ProcessId, children, end, identify, is_alive, kill, this_boot
from pollux.stack.record import (
    ComponentState,
    StackPhase,
    StackPlan,
    StackRecord,
    is_full,
    lock_file,
    read_record,
    stack_lock,
    write_record,
)
from pollux.stack.services import Service, keep_logs_small, log_path, prepare, services
from pollux_agent.protocol import decode

log = logging.getLogger("pollux.stack")

TICK_S = 0.25
PROBE_EVERY_S = 0.5
WATCH_EVERY_S = 2.0
"""Between probes of services that were ready, one at a time: each has its turn some times a minute."""
LOGS_EVERY_S = 60.0
MISSES_UNREADY = 3
MISSES_HUNG = 20
"""Unanswered probes in a row, minutes in all, after which a service counts as hung. They are counted, since
on a machine that was asleep time says nothing."""
START_TIMEOUT_S = 180.0
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0


class Running:
    """One service as the supervisor sees it: its process if any, and when it may start again."""

    def __init__(self, service: Service, log: Path) -> None:
        self.service = service
        self.log = log
        self.child: subprocess.Popen[bytes] | None = None
        self.process: ProcessId | None = None
        self.ready = False
        self.restarts = 0
        self.misses = 0
        self.watched = False
        self.not_before = 0.0
        self._lasting: frozenset[ProcessId] = frozenset()
        self._ends: deque[float] = deque()

    def start(self, mark: str) -> None:
        """Start it, in a session of its own, tethered to this process."""
        wrapper = (sys.executable, "-IS", tether.__file__, str(os.getpid()))
        with self.log.open("ab") as output:
            self.child = subprocess.Popen(
                (*wrapper, *self.service.command),
                env=dict(self.service.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.process = identify(self.child.pid)
        log.info("%s: started, pid %d", self.service.name, self.child.pid)

    def ended(self, now_s: float, *, excused: bool = False) -> None:
        """Clean up after its end and set when it may start again.

        Raises StackError where it ended too often; ends that are ``excused`` do not count.
        """
        if self.process is not None:
            kill((self.process,), mark="")
        self.child, self.process, self.ready = None, None, False
        self.misses, self.watched, self._lasting = 0, False, frozenset()
        self.restarts += 1
        if excused:
            self.not_before = now_s + MAX_BACKOFF_S
            return
        self._ends.append(now_s)
        while self._ends and now_s - self._ends[0] > RESTART_WINDOW_S:
            self._ends.popleft()
        if len(self._ends) > MAX_RESTARTS:
            raise StackError(
                f"{self.service.name}: ended {len(self._ends)} times within {RESTART_WINDOW_S:.0f} s; "
                f"read {self.log}"
            )
        self.not_before = now_s + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (len(self._ends) - 1))

    def probe(self) -> None:
        """Ask whether it is ready; one that was gets some misses before it counts as not ready."""
        if self.service.ready():
            if self.watched and not self.ready:
                log.info("%s: answers again", self.service.name)
            if not self.watched:
                self.lost_a_child()
            self.ready, self.watched, self.misses = True, True, 0
        elif self.watched:
            self.misses += 1
            if self.misses == MISSES_UNREADY:
                self.ready = False
                log.warning("%s: does not answer; see %s", self.service.name, self.log)

    @property
    def hung(self) -> bool:
        return self.misses >= MISSES_HUNG

    def lost_a_child(self) -> bool:
        """Whether one of its lasting children has died since this was last asked."""
        lost = not all(map(is_alive, self._lasting))
        if self.process is not None and self.service.lasting:
            self._lasting = children(self.process, self.service.lasting)
        return lost

    def state(self) -> ComponentState:
        return ComponentState(process=self.process, ready=self.ready, restarts=self.restarts, log=self.log)


class Supervisor:
    """Runs services until told to stop; every change of theirs is in the record before the next tick.

    A disk that refuses the record, or a machine that refuses a process, is tried again and ends nothing.
    """

    def __init__(self, record: StackRecord, wanted: tuple[Service, ...], *, start_timeout_s: float) -> None:
        self.record = record
        self._running = {
            service.name: Running(service, log_path(record.plan.state, service.name)) for service in wanted
        }
        self._start_timeout_s = start_timeout_s
        self._next_probe_s = 0.0
        self._next_watch_s = 0.0
        self._next_logs_s = 0.0
        self._turns: deque[Running] = deque(self._running.values())
        self._stop = False
        self._unpublished = False
        self._lock = lock_file(record.plan.state)

    def stop(self) -> None:
        """Ask for the end; safe in a signal handler."""
        self._stop = True

    def run(self) -> None:
        """Supervise until :meth:`stop`.

        Raises StackError when the stack cannot start or a service ends too often; all processes are gone
        either way.
        """
        try:
            self._publish("starting")
            deadline = time.monotonic() + self._start_timeout_s
            while not self._stop:
                self._tick(time.monotonic())
                if self._removed():
                    raise StackError(f"{self.record.plan.state} was removed under the running stack")
                if self.record.phase == "starting" and time.monotonic() > deadline:
                    raise self._too_slow()
                time.sleep(TICK_S)
        except StackError as error:
            log.error("%s", error)
            self._publish("failed", error=str(error))  # to end them takes longer than whoever waits may wait
            self._end_all()
            self._publish("failed", error=str(error))
            raise
        except BaseException:
            self._end_all()
            self._publish("stopped")
            raise
        self._publish("stopping")
        self._end_all()
        self._publish("stopped")

    def _tick(self, now_s: float) -> None:
        before = self._states()
        for running in self._running.values():
            self._reap(running, now_s)
        for running in self._running.values():
            if self._due(running, now_s):
                self._start(running, now_s)
                self._publish(self.record.phase)
        if now_s >= self._next_probe_s:
            for running in self._running.values():
                if running.child is not None and not running.watched and not running.service.once:
                    running.probe()
            self._next_probe_s = time.monotonic() + PROBE_EVERY_S
        if now_s >= self._next_watch_s:
            self._look_for_lost_children()
            self._watch()
            self._next_watch_s = time.monotonic() + WATCH_EVERY_S
        if now_s >= self._next_logs_s:
            keep_logs_small(self.record.plan.state)
            self._next_logs_s = now_s + LOGS_EVERY_S
        all_ready = all(running.ready for running in self._running.values())
        if all_ready and self.record.phase == "starting":
            log.info("all services are ready")
            self._publish("ready")
        elif self._unpublished or self._states() != before:
            self._publish(self.record.phase)

    def _watch(self) -> None:
        """Ask the next service that was ready whether it still is, and kill one that hangs: it is started
        again as one that ended by itself.
        """
        for _ in range(len(self._turns)):
            running = self._turns[0]
            self._turns.rotate(-1)
            teller = self._running.get(running.service.told_by)
            if running.child is None or not running.watched or (teller is not None and not teller.ready):
                continue
            running.probe()
            if running.hung:
                log.error("%s: did not answer %d times; it is killed", running.service.name, running.misses)
                running.child.kill()
            return

    def _look_for_lost_children(self) -> None:
        for running in self._running.values():
            if running.child is not None and running.watched and running.lost_a_child():
                log.error(
                    "%s: a worker of its was killed while it waited; it is killed", running.service.name
                )
                running.child.kill()

    def _start(self, running: Running, now_s: float) -> None:
        try:
            running.start(self.record.mark)
        except OSError as error:
            if self.record.phase == "starting":
                raise StackError(f"{running.service.name}: could not be started: {error}") from error
            running.ended(now_s, excused=self._disk_is_full())
            log.error("%s: could not be started: %s", running.service.name, error)

    def _reap(self, running: Running, now_s: float) -> None:
        if running.child is None or (code := running.child.poll()) is None:
            return
        name = running.service.name
        if running.service.once and code == 0:
            log.info("%s: finished", name)
            running.child, running.process, running.ready = None, None, True
            return
        if running.service.once or self.record.phase == "starting":
            raise StackError(f"{name}: ended with {_how(code)} while the stack started; read {running.log}")
        full = self._disk_is_full()
        running.ended(now_s, excused=full)
        log.warning(
            "%s: ended with %s%s; starting it again in %.1f s",
            *(name, _how(code), ", as the disk is full" if full else "", running.not_before - now_s),
        )

    def _disk_is_full(self) -> bool:
        """Whether the state folder takes no writes: then services end whose fault it is not, and the others,
        above all the local cluster with its jobs, are worth keeping until there is room.
        """
        return self._unpublished or is_full(self.record.plan.state)

    def _due(self, running: Running, now_s: float) -> bool:
        if running.child is not None or now_s < running.not_before:
            return False
        if running.service.once and running.ready:
            return False
        return all(self._running[name].ready for name in running.service.after)

    def _too_slow(self) -> StackError:
        waiting = [running for running in self._running.values() if not running.ready]
        logs = ", ".join(f"{running.service.name} ({running.log})" for running in waiting)
        return StackError(f"not ready after {self._start_timeout_s:.0f} s: {logs}; read the logs")

    def _end_all(self) -> None:
        """End the services wave by wave; each leader is asked once, what is left is killed."""
        leaders = tuple(running.process for running in self._running.values() if running.process)
        for wave in sorted({running.service.stop_wave for running in self._running.values()}):
            chosen = [
                running
                for running in self._running.values()
                if running.service.stop_wave == wave and running.process
            ]
            log.info("stopping %s", ", ".join(running.service.name for running in chosen))
            end({running.process: running.service.grace_s for running in chosen if running.process})
        if not kill(leaders, self.record.mark):
            log.error("some processes could not be killed")
        for running in self._running.values():
            if running.child is not None:
                running.child.poll()
            running.child, running.process = None, None
            running.ready = False

    def _states(self) -> dict[str, ComponentState]:
        return {name: running.state() for name, running in self._running.items()}

    def _removed(self) -> bool:
        """Whether the state folder is gone, or is another stack's by now."""
        try:
            return lock_file(self.record.plan.state) != self._lock
        except OSError:
            return False

    def _publish(self, phase: StackPhase, *, error: str = "") -> None:
        if self._removed():
            return
        since_unix_s = self.record.since_unix_s if phase == self.record.phase else time.time()
        self.record = replace(
            self.record,
            phase=phase,
            error=error,
            components=self._states(),
            since_unix_s=since_unix_s or time.time(),
        )
        try:
            write_record(self.record)
        except OSError as error:
            if not self._unpublished:
                log.error("the record cannot be written: %s", error)
            self._unpublished = True
        else:
            self._unpublished = False


def new_record(plan: StackPlan) -> StackRecord:
    """The record of a stack about to start; ports of an earlier start are used again where free."""
    old = read_record(plan.state)
    me = identify(os.getpid())
    assert me is not None
    return StackRecord(
        phase="starting",
        plan=plan,
        mark=uuid.uuid4().hex,
        airflow_port=plan.airflow_port or free_port(old.airflow_port if old else None),
        execution_port=free_port(old.execution_port if old else None),
        mlflow_port=plan.mlflow_port or free_port(old.mlflow_port if old else None),
        login=plan.state / "airflow" / "login.json",
        supervisor=me,
        boot=this_boot(),
    )


def supervise(
    plan: StackPlan,
    make_services: Callable[[StackRecord], tuple[Service, ...]] = services,
    *,
    start_timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Run the stack of ``plan`` in this process until SIGTERM or SIGINT; raises StackError."""
    with stack_lock(plan.state) as mine:
        if not mine:
            raise StackError(f"{plan.state}: another supervisor has this state folder")
        if old := read_record(plan.state):
            kill(old.leaders, old.mark)
        record = new_record(plan)
        prepare(record)
        write_record(record)
        record = replace(record, guard=start_guard(plan.state))
        supervisor = Supervisor(record, make_services(record), start_timeout_s=start_timeout_s)

        def on_signal(signum: int, frame: FrameType | None) -> None:
            supervisor.stop()

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        supervisor.run()


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def main() -> None:
    """``python -m pollux.stack.supervisor PLAN`` with the plan as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("plan")
    plan = decode(StackPlan, parser.parse_args().plan)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        supervise(plan)
    except StackError:
        sys.exit(1)


if __name__ == "__main__":
    main()
