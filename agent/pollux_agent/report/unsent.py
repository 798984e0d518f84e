"""Figures that MLflow did not take before a worker's end: kept in the job's folder for who can send them.

That is the job's next incarnation, or the scheduling cycle once the job is over.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pollux_agent.records import read_regular, write_atomic
from pollux_agent.report.outbox import Point

LEFT = 3
"""Exit status of a reporter's process that could not send all: what waited is kept, or said to be lost."""

MAX_BYTES = 64 << 20
"""More than a full queue takes; a larger file is not ours."""


def keep_unsent(path: Path, points: Sequence[Point]) -> None:
    """Write them down in order, in the place of what was there; without any the file goes. Raises OSError."""
    if not points:
        path.unlink(missing_ok=True)
        return
    rows = [(point.name, point.value, point.step, point.time_ms) for point in points]
    write_atomic(path, json.dumps(rows, separators=(",", ":")).encode())


def read_unsent(path: Path) -> tuple[Point, ...]:
    """What was kept, empty where nothing was or where the file is something else."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return ()
        return tuple(
            Point(str(name), float(value), int(step), int(time_ms))
            for name, value, step, time_ms in json.loads(read_regular(path))
        )
    except (OSError, ValueError, TypeError, OverflowError):
        return ()
