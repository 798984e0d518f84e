"""SIGTERM: heard at once, obeyed at the next step boundary, or without one where that is long in coming."""

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

OVERDUE_SHARE, LATE_SHARE = 1 / 3, 2 / 3
"""Parts of the grace period after which a stop does not wait for a step boundary any more, and after which it
does not wait for its peers either."""
_AGAIN_S = 0.1


class StopSignal:
    """SIGTERM as a flag that each step looks at; a handler can be set from the main thread alone.

    Where no step comes to look, as in a long evaluation, ``overdue(late=False)`` is called in the main thread
    after a third of ``grace_s``, and ``overdue(late=True)`` after two thirds; either may end the process.
    """

    def __init__(self, grace_s: float, overdue: Callable[[bool], None]) -> None:
        self.asked = False
        self._grace_s, self.overdue = grace_s, overdue
        self._since_s: float | None = None
        self._heard = 0
        self._pid = os.getpid()
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def release(self) -> None:
        """Let SIGTERM do what it did before."""
        self._since_s = None
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.asked = True
        self._heard += 1
        now = time.monotonic()
        if self._since_s is None:
            self._since_s = now
            _thread.start_new_thread(self._remind, (now,))
        elif now >= self._since_s + OVERDUE_SHARE * self._grace_s:
            self.overdue(now >= self._since_s + LATE_SHARE * self._grace_s)

    def _remind(self, since_s: float) -> None:
        """Have the handler called again, unless SIGTERM is somebody else's by then.

        A signal that comes just before the main thread begins to wait in a system call is heard only behind
        that call, so it is sent until it is heard. A timer of threading must not be started within a handler.
        """
        for share in (OVERDUE_SHARE, LATE_SHARE):
            time.sleep(max(0.0, since_s + share * self._grace_s - time.monotonic()) + 0.01)
            heard = self._heard
            while self._heard == heard:
                if self._since_s is None or signal.getsignal(signal.SIGTERM) != self._handle:
                    return
                with suppress(OSError, RuntimeError):
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                time.sleep(_AGAIN_S)
