"""One training of a race: the processes of its ranks, which run in its turns and are stopped between them."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from pollux_agent.errors import PolluxAgentError

_LIMIT_S = 300.0


class Competitor:
    """Starts ``command`` once for each rank's environment; a context manager that ends its processes.

    A rank says ``ready``, then answers each number of steps with their seconds. ``folder`` takes what it
    writes to its standard error. Raises PolluxAgentError with the end of that if a rank ends, or does not
    answer for five minutes.
    """

    def __init__(
        self, name: str, command: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path
    ) -> None:
        self._name, self._command, self._environments = name, command, environments
        self._errors = folder / "stderr.txt"
        self._stack = ExitStack()
        self._ranks: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        with self._stack as stack:
            errors = stack.enter_context(self._errors.open("w"))
            for environment in self._environments:
                process = stack.enter_context(
                    subprocess.Popen(
                        self._command,
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        start_new_session=True,
                    )
                )
                stack.callback(_signal_group, process, signal.SIGKILL)
                self._ranks.append(process)
            self._answers()
            self._signal(signal.SIGSTOP)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def turn(self, steps: int) -> float:
        """Train ``steps`` steps; rank 0's seconds."""
        self._signal(signal.SIGCONT)
        for process in self._ranks:
            assert process.stdin
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        seconds = self._answers()
        self._signal(signal.SIGSTOP)
        return float(seconds[0])

    def _answers(self) -> list[str]:
        """The last word of each rank's next line."""
        watchdog = threading.Timer(_LIMIT_S, self._signal, [signal.SIGKILL])
        watchdog.start()
        try:
            lines = [process.stdout.readline() for process in self._ranks if process.stdout]
        finally:
            watchdog.cancel()
        if not all(lines):
            raise PolluxAgentError(f"{self._name} failed: {self._errors.read_text().strip()[-2000:]}")
        return [line.split()[-1] for line in lines]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._ranks:
            _signal_group(process, number)


def _signal_group(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """To a rank and what it has started, which works for it in its turns alone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
