"""The thread that carries a job's figures to its MLflow run."""

import logging
import math
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pollux_agent.errors import DocumentError, FencedError
from pollux_agent.protocol import MAX_REPORT_CHARS, REPORT_TAG, Report, decode, encode
from pollux_agent.report.base import RunStatus
from pollux_agent.report.client import connect, in_words, is_passing
from pollux_agent.report.outbox import Batch, Outbox, Point
from pollux_agent.report.prior import Earlier, ask_for_prior
from pollux_agent.report.unsent import keep_unsent, read_unsent

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

INCARNATION_TAG = "pollux.incarnation"
"""Run tag with the number of the incarnation that writes; set before its first figure."""

MAX_BATCH_POINTS = 500
MAX_ABS_VALUE = 1e300
"""SQL stores give infinity back as 1.8e308, so figures that large are taken for it."""

_CALL_TIMEOUT_S = 10
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_MAX_ARTIFACT_ATTEMPTS = 20


class MlflowReporter:
    """Figures, reports and files of one incarnation, sent in order by a daemon thread.

    The thread starts with the first thing to send. While MLflow is away up to ``max_points`` points and the
    latest report wait. A batch that MLflow refuses is halved until the metric that it refuses stands alone;
    that one is dropped, with all its later values. Before its first write and with each report it reads which
    incarnation wrote last; if that is a newer one it sends nothing any more, and ``fenced`` is true.
    Points that wait at the close are kept in the file ``unsent``, which the job's next reporter sends first.
    ``num_nonfinite`` is how many values that are not finite were counted before.
    """

    def __init__(
        self,
        tracking_uri: str,
        run_id: str,
        incarnation: int,
        *,
        max_points: int = 200_000,
        max_artifact_bytes: int = 16 << 20,
        flush_interval_s: float = 5.0,
        unsent: Path | None = None,
        num_nonfinite: int = 0,
    ) -> None:
        self._tracking_uri = tracking_uri
        self._run_id = run_id
        self._incarnation = incarnation
        self._flush_interval_s = flush_interval_s
        self._outbox = Outbox(max_points=max_points, max_artifact_bytes=max_artifact_bytes)
        self._thread = threading.Thread(target=self._work, name="pollux-report", daemon=True)
        self._started = threading.Lock()
        self._client: MlflowClient | None = None
        self._claimed = False
        self._fenced = False
        self._away = False
        self._num_nonfinite = num_nonfinite
        self._artifact_attempts = 0
        self._batch_points = MAX_BATCH_POINTS
        self._refused: set[str] = set()
        self._unsent = unsent
        self._recalling = threading.Lock()
        self._recalled = False
        self._last_recalled: Point | None = None

    @property
    def fenced(self) -> bool:
        return self._fenced

    @property
    def idle(self) -> bool:
        """Whether all is sent, what was kept before included."""
        return self._recalled and self._outbox.is_empty

    @property
    def num_nonfinite(self) -> int:
        """How many values were counted and not logged."""
        return self._num_nonfinite

    def watermark(self) -> Callable[[], bool]:
        """Tells, at any later time, whether all points given up to now have arrived or never will."""
        newest = self._outbox.newest
        return lambda: newest is None or self._fenced or not self._outbox.holds(newest)

    def send_kept(self) -> None:
        """Send what an earlier incarnation could not, also if nothing new follows."""
        self._open()

    def metrics(self, values: Mapping[str, float], step: int, *, time_ms: int | None = None) -> None:
        """``time_ms`` is when they were measured, in Unix milliseconds: now unless it is given."""
        if time_ms is None:
            time_ms = int(time.time() * 1000)
        wanted = {name: value for name, value in values.items() if name not in self._refused}
        points, self._num_nonfinite = points_of(wanted, int(step), time_ms, self._num_nonfinite)
        if points and self._open():
            self._outbox.put_points(points)

    def report(self, report: Report) -> None:
        text = text_of(report)
        if text is not None and self._open():
            self._outbox.put_report(text)

    def artifact(self, name: str, data: bytes) -> None:
        path = PurePosixPath(name)
        if not path.name or path.is_absolute() or ".." in path.parts:
            logger.error("file %r is not sent: its name must be a relative path without '..'", name)
        elif self._open():
            self._outbox.put_artifact(str(path), bytes(data))

    def ask_for_earlier(self, give: Callable[[Earlier], None]) -> None:
        ask_for_prior(self._tracking_uri, self._run_id, give)

    def finish(self, status: RunStatus) -> None:
        if self._open():
            self._outbox.put_finish(status)

    def close(self, timeout_s: float = 10.0) -> bool:
        self._outbox.close(time.monotonic() + timeout_s)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            self._recall()  # the thread may not have come to it
        points = self._outbox.points
        if self._unsent is None and points and not self._fenced:
            logger.warning("%d figures that MLflow has not taken are lost", len(points))
        elif self._recalled and not self._fenced:
            self._keep(points)
        return self._outbox.is_empty and not self._thread.is_alive()

    def _open(self) -> bool:
        """Start the thread if it has not run yet; false once nothing will be sent any more."""
        if self._fenced or self._outbox.closing_until_s is not None:
            return False
        with self._started:
            if self._thread.ident is None:
                self._thread.start()
        return True

    def _recall(self) -> None:
        """Take up what an earlier incarnation could not send; a point that is sent twice stays one."""
        with self._recalling:
            if self._unsent is None or self._recalled:
                return
            if earlier := read_unsent(self._unsent):
                self._last_recalled = earlier[-1]
                self._outbox.put_first(earlier)
            self._recalled = True

    def _keep(self, points: Sequence[Point]) -> None:
        assert self._unsent is not None
        try:
            keep_unsent(self._unsent, points)
        except OSError as error:
            logger.warning("%d figures that MLflow has not taken are lost: %s", len(points), error)

    def _work(self) -> None:
        self._recall()
        pause_s = _FIRST_PAUSE_S
        while True:
            self._outbox.wait(batch_points=MAX_BATCH_POINTS, flush_interval_s=self._flush_interval_s)
            careful = self._batch_points < MAX_BATCH_POINTS
            batch = self._outbox.peek(self._batch_points, apart=careful)
            until_s = self._outbox.closing_until_s
            if until_s is not None and (batch.empty or time.monotonic() > until_s):
                return
            if self._delivered(batch):
                pause_s = _FIRST_PAUSE_S
            elif self._fenced:
                return
            else:
                self._outbox.pause(pause_s if until_s is None else _FIRST_PAUSE_S)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _delivered(self, batch: Batch) -> bool:
        """Try once; true if nothing of the batch is left to send, because it arrived or never will."""
        try:
            self._send(batch)
        except FencedError as error:
            logger.warning("%s", error)
            self._fenced = True
            self._outbox.clear()
            return False
        except Exception as error:  # noqa: BLE001 - the thread's outermost edge: no fault may end it
            return self._after_error(batch, error)
        self._outbox.sent(batch)
        if any(point is self._last_recalled for point in batch.points):
            self._keep(())
        self._artifact_attempts = 0
        self._batch_points = min(2 * self._batch_points, MAX_BATCH_POINTS)
        if self._away:
            logger.info("MLflow answers again")
        self._away = False
        return True

    def _after_error(self, batch: Batch, error: Exception) -> bool:
        waits = self._client is None or not self._claimed or is_passing(error)
        if batch.artifact is not None:
            self._artifact_attempts += 1
            waits = self._artifact_attempts < _MAX_ARTIFACT_ATTEMPTS
        if waits:
            if not self._away:
                logger.warning(
                    "MLflow takes nothing now, what is reported waits: %s",
                    in_words(error, self._tracking_uri),
                )
            self._away = True
            return False
        words = in_words(error, self._tracking_uri)
        if len(batch.points) > 1 or (batch.points and batch.report is not None):
            self._batch_points = max(1, len(batch.points) // 2)
        elif batch.points:
            name = batch.points[0].name
            self._refused.add(name)
            self._outbox.forget(name)
            logger.error(
                "MLflow refuses the metric %r of run %s, so it is dropped: %s", name, self._run_id, words
            )
        else:
            logger.error("MLflow refuses what run %s sends, so it is dropped: %s", self._run_id, words)
            self._outbox.sent(batch)
        return True

    def _send(self, batch: Batch) -> None:
        if self._client is None:
            self._client = connect(self._tracking_uri, timeout_s=_CALL_TIMEOUT_S)
        if not self._claimed or batch.report is not None:
            self._check_fence(self._client)
        if batch.points or batch.report is not None:
            self._send_figures(self._client, batch)
        if batch.artifact is not None:
            self._send_artifact(self._client, batch.artifact[1], batch.artifact[2])
        if batch.finish is not None:
            self._client.set_terminated(self._run_id, status=batch.finish)

    def _check_fence(self, client: "MlflowClient") -> None:
        """Raise FencedError if a newer incarnation writes this run; else say that this one does."""
        tags = client.get_run(self._run_id).data.tags
        stored = max(_incarnation(tags.get(INCARNATION_TAG)), _reported_incarnation(tags.get(REPORT_TAG)))
        if stored > self._incarnation:
            raise FencedError(
                f"incarnation {stored} writes MLflow run {self._run_id} now; "
                f"incarnation {self._incarnation} stops writing"
            )
        if not self._claimed:
            client.set_tag(self._run_id, INCARNATION_TAG, str(self._incarnation))
            self._claimed = True

    def _send_figures(self, client: "MlflowClient", batch: Batch) -> None:
        from mlflow.entities import Metric, RunTag

        client.log_batch(
            self._run_id,
            metrics=[Metric(point.name, point.value, point.time_ms, point.step) for point in batch.points],
            tags=[] if batch.report is None else [RunTag(REPORT_TAG, batch.report[1])],
        )

    def _send_artifact(self, client: "MlflowClient", name: str, data: bytes) -> None:
        path = PurePosixPath(name)
        folder = None if len(path.parts) == 1 else str(path.parent)
        with tempfile.TemporaryDirectory(prefix="pollux-report-") as scratch:
            local = Path(scratch) / path.name
            local.write_bytes(data)
            client.log_artifact(self._run_id, str(local), folder)


def points_of(
    values: Mapping[str, float], step: int, time_ms: int, num_nonfinite: int
) -> tuple[list[Point], int]:
    """The points that a store keeps as they are, and one with how many values were none up to now, if any is
    new to the ``num_nonfinite`` of before; with that number.
    """
    points = []
    num_before = num_nonfinite
    for name, value in values.items():
        number = _finite(value)
        if number is None:
            num_nonfinite += 1
        else:
            points.append(Point(name, number, step, time_ms))
    if num_nonfinite > num_before:
        points.append(Point("nonfinite_values", float(num_nonfinite), step, time_ms))
    return points, num_nonfinite


def text_of(report: Report) -> str | None:
    """The report as it is sent; None, and the cause in the log, for one that cannot be."""
    try:
        text = encode(report)
    except ValueError as error:
        logger.error("report %d is not sent: %s", report.sequence, error)
        return None
    if len(text) > MAX_REPORT_CHARS:
        logger.error(
            "report %d is not sent: it has %d characters, above the %d that MLflow keeps of a tag; "
            "report fewer GPU types",
            report.sequence,
            len(text),
            MAX_REPORT_CHARS,
        )
        return None
    return text


def number_of(value: object) -> float:
    """The value as a number, NaN for what is none, which is counted and not logged."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _finite(value: object) -> float | None:
    """The value as a number that a store keeps as it is, else None."""
    number = number_of(value)
    return number if math.isfinite(number) and abs(number) <= MAX_ABS_VALUE else None


def _incarnation(text: str | None) -> int:
    """The number in an incarnation tag, -1 where it cannot be read."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else -1


def _reported_incarnation(text: str | None) -> int:
    """The incarnation of a stored report, -1 where it cannot be read."""
    try:
        return -1 if text is None else decode(Report, text).incarnation
    except DocumentError:
        return -1
