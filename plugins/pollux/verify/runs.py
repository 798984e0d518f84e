"""MLflow's runs, read from its SQLite file without MLflow, so that nothing is migrated or written."""

import math
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.errors import StoreError

JOB_TAG = "pollux.job_id"

REQUIRED_METRICS = (
    "goodput",
    "throughput",
    "efficiency",
    "pgns",
    "batch_size",
    "gpus",
    "lr_factor",
    "step_time_s",
    "examples_processed",
    "optimizer_updates",
    "progress",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run with the last value of each metric; ``job_id`` is the tag that says whose run it is."""

    run_id: str
    status: str
    job_id: str
    experiment_id: str
    metrics: Mapping[str, float]


def read_runs(database: Path) -> tuple[Run, ...]:
    """Every run of a job that was not deleted.

    Raises StoreError when the file is missing or is no MLflow database.
    """
    if not database.is_file():
        raise StoreError(f"{database}: no such file; it is MLflow's SQLite database")
    try:
        with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            metrics: dict[str, dict[str, float]] = {}
            for run_id, key, value, is_nan in connection.execute(
                "SELECT run_uuid, key, value, is_nan FROM latest_metrics"
            ):
                metrics.setdefault(str(run_id), {})[str(key)] = _number(value, is_nan)
            rows = connection.execute(
                "SELECT r.run_uuid, r.status, t.value, r.experiment_id FROM runs r"
                " JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = ?"
                " WHERE r.lifecycle_stage = 'active' ORDER BY r.start_time, r.run_uuid",
                (JOB_TAG,),
            ).fetchall()
    except (sqlite3.Error, UnicodeError) as error:
        raise StoreError(f"{database}: cannot be read as MLflow's database: {error}") from None
    return tuple(
        Run(
            run_id=str(run_id),
            status=str(status),
            job_id=str(job_id),
            experiment_id=str(experiment_id),
            metrics=metrics.get(str(run_id), {}),
        )
        for run_id, status, job_id, experiment_id in rows
    )


def _number(value: Any, is_nan: Any) -> float:
    """MLflow stores NaN as 0 with a flag and infinity as the largest float; both count as no number."""
    if is_nan or not isinstance(value, int | float) or abs(value) > 1e300:
        return math.nan
    return float(value)
