"""What training code needs of a reporter, and the one that reports nowhere."""

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from pollux_agent.protocol import Report
from pollux_agent.report.prior import Earlier

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


class Reporter(Protocol):
    """Where a job tells about itself. No method blocks (but ``close``, for its timeout) or raises."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log figures at ``step``; values that are not finite are counted, not logged."""
        ...

    def report(self, report: Report) -> None:
        """Store the job's report; it replaces an older one that was not sent yet."""
        ...

    def artifact(self, name: str, data: bytes) -> None:
        """Store a file under ``name`` (a relative path); the latest of a name replaces an unsent one."""
        ...

    def ask_for_earlier(self, give: Callable[[Earlier], None]) -> None:
        """Look for what earlier runs of the model know, and ``give`` it, from a thread, if there is any."""
        ...

    def finish(self, status: RunStatus) -> None:
        """End the run once all that was given before is sent."""
        ...

    def close(self, timeout_s: float = 10.0) -> bool:
        """Send what waits and stop, for at most ``timeout_s``; whether all of it was sent."""
        ...


class NullReporter:
    """The reporter of a job without a run."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Forget the figures."""

    def report(self, report: Report) -> None:
        """Forget the report."""

    def artifact(self, name: str, data: bytes) -> None:
        """Forget the file."""

    def ask_for_earlier(self, give: Callable[[Earlier], None]) -> None:
        """Nowhere to look."""

    def finish(self, status: RunStatus) -> None:
        """Nothing to end."""

    def close(self, timeout_s: float = 10.0) -> bool:
        """Nothing to send."""
        return True
