"""Brings what a job does and prints into an Airflow log: each line once, also over restarts."""

import logging
import time
from collections import deque
from itertools import count
from pathlib import Path

from pollux.cluster.base import FINAL_PHASES, ClusterJob, JobControl
from pollux.errors import ClusterUnavailable, Refused
from pollux_agent.protocol import Placement

_COMPLAIN_EVERY_S = 60.0
_MAX_CHUNKS = 8
_MAX_LOGGED_CHARS = 256 * 1024
_MAX_LAST_CHARS = 64 * 1024
"""Airflow's log takes some hundred lines a second, for all tasks of a triggerer together; of what was printed
since the last look more than this is left out, but for the last of it."""


class Relay:
    """Watches one job for one log.

    ``cursor_file`` remembers how far the workers' output was copied, so that another relay (after a restart,
    or in the next try) goes on from there; without it, or if it cannot be read, a relay starts from the
    beginning.
    """

    def __init__(
        self, control: JobControl, job_id: str, log: logging.Logger, *, cursor_file: Path | None = None
    ) -> None:
        self._control = control
        self._job_id = job_id
        self._log = log
        self._cursor_file = cursor_file
        self._cursor = _read(cursor_file)
        self._seen: ClusterJob | None = None
        self._complained_at_s: float | None = None

    def poll(self) -> ClusterJob | None:
        """Copy what is new; the job if it is over, None while it goes on or the cluster does not answer.

        Raises UnknownJob.
        """
        try:
            job = self._control.job(self._job_id)
            self._note(job)
            self._copy_output(all_of_it=job.status.phase in FINAL_PHASES)
        except ClusterUnavailable as error:
            self._complain(error)
            return None
        self._complained_at_s = None
        return job if job.status.phase in FINAL_PHASES else None

    def _copy_output(self, *, all_of_it: bool) -> None:
        """The lines are logged before the cursor is kept: a crash in between repeats a line, loses none.

        While the job goes on only so much is read at a time, so that one that prints without end leaves
        other jobs their turn.
        """
        page = _Page(self._log)
        try:
            self._read_on(page, all_of_it=all_of_it)
        finally:
            if page.is_full:
                page.end()
                _write(self._cursor_file, self._cursor)

    def _read_on(self, page: "_Page", *, all_of_it: bool) -> None:
        for turn in count():
            if turn >= _MAX_CHUNKS and not all_of_it:
                return
            try:
                chunk = self._control.logs(self._job_id, self._cursor)
            except Refused as error:
                if not self._cursor:
                    raise
                self._log.warning("Reading the output from its beginning again: %s", error)
                self._cursor = ""
                continue
            for line in chunk.lines:
                page.add(line)
            if chunk.cursor != self._cursor:
                self._cursor = chunk.cursor
                if not page.is_full:
                    _write(self._cursor_file, chunk.cursor)
            if not chunk.lines:
                return

    def _note(self, job: ClusterJob) -> None:
        for text in changes(self._seen, job):
            self._log.info("%s", text)
        self._seen = job

    def _complain(self, error: ClusterUnavailable) -> None:
        now_s = time.monotonic()
        if self._complained_at_s is None or now_s - self._complained_at_s >= _COMPLAIN_EVERY_S:
            self._complained_at_s = now_s
            self._log.warning("%s cannot be looked at just now, it is watched on: %s", self._job_id, error)


class _Page:
    """Lines of one look: logged at once while there is room, and of those beyond it the last at the end."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._room = _MAX_LOGGED_CHARS
        self._last: deque[str] = deque()
        self._last_chars = 0
        self._left_out = 0

    @property
    def is_full(self) -> bool:
        return self._room <= 0

    def add(self, line: str) -> None:
        if not self.is_full:
            self._log.info("%s", line)
            self._room -= len(line) + 1
            return
        self._last.append(line)
        self._last_chars += len(line) + 1
        while self._last_chars > _MAX_LAST_CHARS and len(self._last) > 1:
            self._last_chars -= len(self._last.popleft()) + 1
            self._left_out += 1

    def end(self) -> None:
        if self._left_out:
            self._log.warning(
                "%d lines are left out here, too many for this log; see logs in the job's folder, or "
                "`pollux local logs`",
                self._left_out,
            )
        for line in self._last:
            self._log.info("%s", line)


def changes(before: ClusterJob | None, now: ClusterJob) -> list[str]:
    """What a person wants to read about the step from ``before`` (None: nothing is known) to ``now``."""
    texts = []
    old = before.allocation.placement if before else {}
    new = now.allocation.placement
    because = f": {now.allocation.reason}" if now.allocation.reason else ""
    if new != old and now.status.phase not in FINAL_PHASES:
        change = f"{sum(old.values())} -> {sum(new.values())} GPUs" if old else _on(new)
        verb = "resizing" if old and new else "pausing" if old else "allocated"
        texts.append(f"{verb} {change} (decision {now.allocation.decision}){because}")
    status = now.status
    if before is None or (before.status.phase, before.status.message, before.status.incarnation) != (
        status.phase,
        status.message,
        status.incarnation,
    ):
        texts.append(_phase(now))
    return texts


def _phase(job: ClusterJob) -> str:
    status = job.status
    if status.phase == "waiting":
        return f"waiting: {status.message or job.allocation.reason or 'for the next scheduling cycle'}"
    if status.phase in ("starting", "running"):
        where = status.message or f"on {_on(status.held or job.allocation.placement)}"
        return f"{status.phase}, incarnation {status.incarnation}: {where}"
    return f"{status.phase}: {status.message}" if status.message else status.phase


def _on(placement: Placement) -> str:
    return ", ".join(f"{node}: {gpus}" for node, gpus in placement.items())


def _read(path: Path | None) -> str:
    try:
        return path.read_text() if path else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _write(path: Path | None, cursor: str) -> None:
    """Atomic; a folder that is not there (a job elsewhere, or removed) costs only the memory of it."""
    if path is None or not path.parent.is_dir():
        return
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(cursor)
        partial.replace(path)
    except OSError:
        return
