"""A process that ends with its parent, so that nothing is left behind when a parent is killed."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent_pid: int | None) -> None:
    """Have the kernel kill this process (SIGKILL) when the thread that started it ends; Linux only.

    ``parent_pid`` is who should be the parent: if it is gone already, this process exits at once. Nothing
    happens for None, or on a system without such a signal.
    """
    if parent_pid is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def name_process(name: str) -> None:
    """Have process lists call this process ``name`` (its first 15 bytes); Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
