"""The real supervisor over small real services; run as a file with the state folder as argument."""

import sys
from pathlib import Path

from pollux.errors import StackError
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

    def service(name: str, code: str, *arguments: str) -> Service:
        flag = state / f"{name}.up"
        flag.unlink(missing_ok=True)
        return Service(
            name=name,
            command=(sys.executable, "-c", code, str(flag), *arguments),
            environ=environ,
            ready=flag.exists,
            after=("migrate",),
            grace_s=1.0,
        )

    migrate = Service(
        name="migrate",
        command=(sys.executable, "-c", f"open({str(state / 'migrated')!r}, 'w').close()"),
        environ=environ,
        once=True,
    )
    return (
        migrate,
        service("breeder", BREEDER),
        service("stubborn", STUBBORN),
        service("fragile", FRAGILE, str(state / "poison")),
    )


if __name__ == "__main__":
    here = Path(sys.argv[1])
    try:
        supervise(StackPlan(state=here, dags=here, scripts=here), toys, start_timeout_s=20)
    except StackError:
        sys.exit(1)
