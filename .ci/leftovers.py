"""Processes of this checkout: ``before`` prints those that run now, ``after FILE`` fails if new ones do.

A process is of this checkout if it has a file of its .venv mapped, or CI's mark in its environment.
"""

import os
import sys
import time
from pathlib import Path

VENV = str(Path(__file__).resolve().parents[1] / ".venv") + "/"
PATIENCE_S = 20.0


def ours() -> dict[str, str]:
    """``pid start-ticks`` -> command line, without this process and those that it descends from."""
    found: dict[str, str] = {}
    ancestors = _ancestors()
    mark = os.environ.get("POLLUX_CI_MARK", "")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in ancestors:
            continue
        try:
            maps = (entry / "maps").read_text(errors="replace")
            environ = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            started = (entry / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[19]
        except OSError:
            continue
        if VENV in maps or (mark and f"POLLUX_CI_MARK={mark}".encode() in environ):
            found[f"{entry.name} {started}"] = command.strip()
    return found


def _ancestors() -> set[int]:
    pid, seen = os.getpid(), set()
    while pid > 1:
        seen.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return seen


def main() -> int:
    """Print or compare."""
    if sys.argv[1] == "before":
        print("\n".join(ours()))
        return 0
    known = set(Path(sys.argv[2]).read_text().splitlines())
    deadline = time.monotonic() + PATIENCE_S
    while left := {key: command for key, command in ours().items() if key not in known}:
        if time.monotonic() > deadline:
            print("processes were left behind (pid, start, command):", file=sys.stderr)
            for key, command in left.items():
                print(f"  {key} {command[:200]}", file=sys.stderr)
            return 1
        time.sleep(0.5)
    print("no process was left behind")
    return 0


if __name__ == "__main__":
    sys.exit(main())
