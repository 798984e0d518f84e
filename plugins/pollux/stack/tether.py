"""Run a program that ends when its parent does: ``tether.py PARENT_PID PROGRAM ARGUMENT...``.

Started as a file with ``python -IS``, so it imports the standard library alone and takes milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGTERM at the parent's death, then become the program."""
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        sys.exit("the parent ended before the start")
    os.execvp(command[0], command)  # noqa: S606 - no shell on purpose


if __name__ == "__main__":
    main()
