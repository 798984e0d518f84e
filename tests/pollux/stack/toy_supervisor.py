"""The real supervisor over small real services; run as a file with the state folder as argument.

With ``hasty`` as second argument it looks far more often for services that hang, and restarts soon.
"""

import sys
from pathlib import Path

from pollux.errors import StackError
from pollux.stack import supervisor
from pollux.stack.record import StackPlan, StackRecord
from pollux.stack.services import MARK_VARIABLE, Service
from pollux.stack.supervisor import supervise

BREEDER = """
import os, pathlib, subprocess, sys, time
bare = {"PATH": os.environ["PATH"]}
subprocess.Popen(["sleep", "300"], start_new_session=True)   # found by its environment
subprocess.Popen(["sleep", "301"], env=bare)                 # found by its session
pathlib.Path(sys.argv[1]).write_text("up")
time.sleep(300)
"""
STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text("up")
time.sleep(300)
"""
FRAGILE = """
import pathlib, sys, time
poison = pathlib.Path(sys.argv[2])
pathlib.Path(sys.argv[1]).write_text("up")
while not poison.exists():
    time.sleep(0.05)
print("poisoned")
sys.exit(3)
"""


def toys(record: StackRecord) -> tuple[Service, ...]:
    """A program that must end first, and three services with bad habits."""
    state = record.plan.state
    environ = {"PATH": "/usr/bin:/bin", MARK_VARIABLE: record.mark}

    def service(name: str, code: str, *arguments: str, told_by: str = "", lasting: str = "") -> Service:
        flag = state / f"{name}.up"
        flag.unlink(missing_ok=True)
        teller = state / f"{told_by or name}.up"
        return Service(
            name=name,
            command=(sys.executable, "-c", code, str(flag), *arguments),
            environ=environ,
            ready=lambda: flag.exists() and teller.exists(),
            after=("migrate",),
            grace_s=1.0,
            told_by=told_by,
            lasting=lasting,
        )

    migrate = Service(
        name="migrate",
        command=(sys.executable, "-c", f"open({str(state / 'migrated')!r}, 'w').close()"),
        environ=environ,
        once=True,
    )
    return (
        migrate,
        service("breeder", BREEDER, told_by="stubborn", lasting="sleep 301"),
        service("stubborn", STUBBORN),
        service("fragile", FRAGILE, str(state / "poison")),
    )


if __name__ == "__main__":
    here = Path(sys.argv[1])
    if sys.argv[2:] == ["hasty"]:
        supervisor.TICK_S = supervisor.WATCH_EVERY_S = supervisor.MAX_BACKOFF_S = 0.05
    try:
        supervise(StackPlan(state=here, dags=here, scripts=here), toys, start_timeout_s=20)
    except StackError:
        sys.exit(1)
