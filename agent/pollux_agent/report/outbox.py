"""What waits to be sent: bounded, thread-safe, and taken out only once it has arrived."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from pollux_agent.report.base import RunStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric; ``time_ms`` makes a point that is sent twice the same point."""

    name: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes out in one round; an empty part is nothing to send."""

    points: tuple[Point, ...] = ()
    report: tuple[int, str] | None = None
    artifact: tuple[int, str, bytes] | None = None
    finish: RunStatus | None = None

    @property
    def empty(self) -> bool:
        return not self.points and self.report is None and self.artifact is None and self.finish is None


@dataclass(slots=True)
class Outbox:
    """At most ``max_points`` points and ``max_artifact_bytes`` of files; beyond, the oldest are dropped.

    Reports and files carry a number, so that one put in while its predecessor was on its way stays.
    """

    max_points: int
    max_artifact_bytes: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    num_dropped: int = 0
    closing_until_s: float | None = None
    _points: deque[Point] = field(default_factory=deque)
    _report: tuple[int, str] | None = None
    _artifacts: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    _finish: RunStatus | None = None
    _number: int = 0

    def put_points(self, points: list[Point]) -> None:
        with self.changed:
            self._points.extend(points)
            surplus = len(self._points) - self.max_points
            if surplus > 0:
                if self.num_dropped == 0:
                    logger.warning(
                        "MLflow queue is full (%d points); the oldest are dropped", self.max_points
                    )
                self.num_dropped += surplus
                for _ in range(surplus):
                    self._points.popleft()
            self.changed.notify_all()

    def put_first(self, points: Sequence[Point]) -> None:
        """Put points of earlier in front of all others, as far as there is room."""
        with self.changed:
            room = self.max_points - len(self._points)
            self._points.extendleft(reversed(points[max(0, len(points) - room) :]))
            self.changed.notify_all()

    @property
    def points(self) -> tuple[Point, ...]:
        """The points that wait, in order."""
        with self.changed:
            return tuple(self._points)

    @property
    def newest(self) -> Point | None:
        """The point that goes out last."""
        with self.changed:
            return self._points[-1] if self._points else None

    def holds(self, point: Point) -> bool:
        """Whether this very object waits, or is on its way."""
        with self.changed:
            return any(each is point for each in self._points)

    def put_report(self, text: str) -> None:
        with self.changed:
            self._number += 1
            self._report = (self._number, text)
            self.changed.notify_all()

    def put_artifact(self, name: str, data: bytes) -> None:
        with self.changed:
            self._number += 1
            self._artifacts.pop(name, None)
            self._artifacts[name] = (self._number, data)
            while sum(len(data) for _, data in self._artifacts.values()) > self.max_artifact_bytes:
                oldest = next(iter(self._artifacts))
                del self._artifacts[oldest]
                logger.warning("MLflow queue is full; file %s is dropped", oldest)
            self.changed.notify_all()

    def put_finish(self, status: RunStatus) -> None:
        with self.changed:
            self._finish = status
            self.changed.notify_all()

    def close(self, until_s: float) -> None:
        """Let the sender go on until the monotonic time ``until_s``, without pauses for batching."""
        with self.changed:
            self.closing_until_s = until_s
            self.changed.notify_all()

    def clear(self) -> None:
        with self.changed:
            self._points.clear()
            self._report = None
            self._artifacts.clear()
            self._finish = None

    def wait(self, *, batch_points: int, flush_interval_s: float) -> None:
        """Return once there is a batch worth sending, or on close."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing_until_s is not None or not self._is_empty())
            self.changed.wait_for(
                lambda: (
                    self.closing_until_s is not None
                    or len(self._points) >= batch_points
                    or self._report is not None
                    or self._finish is not None
                ),
                timeout=flush_interval_s,
            )

    def pause(self, seconds: float) -> None:
        """Wait ``seconds``, or until the close that is still to come."""
        with self.changed:
            if self.closing_until_s is None:
                self.changed.wait_for(lambda: self.closing_until_s is not None, timeout=seconds)
                return
            left_s = self.closing_until_s - time.monotonic()
        time.sleep(max(0.0, min(seconds, left_s)))

    def peek(self, batch_points: int, *, apart: bool = False) -> Batch:
        """The next batch: points in order, the report behind the points put in before it, then the rest.

        Points and report come ``apart`` where one of them may be refused.
        """
        with self.changed:
            points = tuple(islice(self._points, batch_points))
            if len(points) < len(self._points):
                return Batch(points=points)
            if points or self._report is not None:
                return Batch(points=points, report=None if points and apart else self._report)
            if self._artifacts:
                name, (number, data) = next(iter(self._artifacts.items()))
                return Batch(artifact=(number, name, data))
            return Batch(finish=self._finish)

    def forget(self, name: str) -> int:
        """Drop all points of a metric; how many."""
        with self.changed:
            kept = [point for point in self._points if point.name != name]
            num_dropped = len(self._points) - len(kept)
            self._points = deque(kept)
            return num_dropped

    def sent(self, batch: Batch) -> None:
        """Take out what has arrived; what replaced it meanwhile stays."""
        with self.changed:
            for point in batch.points:
                if self._points and self._points[0] is point:
                    self._points.popleft()
            if batch.report is not None and self._report == batch.report:
                self._report = None
            if batch.artifact is not None:
                number, name, _ = batch.artifact
                if self._artifacts.get(name, (0, b""))[0] == number:
                    del self._artifacts[name]
            if batch.finish is not None:
                self._finish = None

    @property
    def is_empty(self) -> bool:
        with self.changed:
            return self._is_empty()

    def _is_empty(self) -> bool:
        return not (self._points or self._report or self._artifacts or self._finish)
