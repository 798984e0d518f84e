"""The agent's settings, read from the environment in one place and by a call, never at import."""

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, JobFolder, Placement, from_plain


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class WorkerSettings:
    """What the driver tells the workers of one node; ARCHITECTURE.md lists the variables.

    ``slot_share`` is the fraction of a core that one slot is, set only where the agent itself must keep
    to it; ``signal_unix_s`` is when the previous incarnation was asked to stop; ``parent_pid`` is the process
    without which this one may not go on, ``cpu_group`` the file by which workers enter their CPU quota;
    ``launched_unix_s`` is when the launcher began.
    """

    job_id: str
    job_dir: Path
    incarnation: Annotated[int, Field(ge=0)]
    node: str
    slots: tuple[int, ...]
    placement: Placement
    node_rank: Annotated[int, Field(ge=0)] = 0
    rendezvous: str = ""
    gpu_type: str = "gpu"
    signal_unix_s: float | None = None
    slot_share: Annotated[float, Field(gt=0, le=1)] | None = None
    grace_s: Annotated[float, Field(gt=0)] = 30.0
    report_interval_s: Annotated[float, Field(gt=0)] = 30.0
    checkpoint_interval_s: Annotated[float, Field(gt=0)] = 30.0
    mlflow_tracking_uri: str = ""
    mlflow_run_id: str = ""
    parent_pid: int | None = None
    cpu_group: Path | None = None
    launched_unix_s: float | None = None

    @property
    def folder(self) -> JobFolder:
        return JobFolder(self.job_dir)

    @property
    def report_interval(self) -> timedelta:
        return timedelta(seconds=self.report_interval_s)


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class TrackingSettings:
    """Where a training without a driver reports to; empty: a new run, in the experiment Default."""

    tracking_uri: str
    experiment_name: str = ""
    run_id: str = ""


def tracking_settings(
    tracking_uri: str | None = None, environ: Mapping[str, str] | None = None
) -> TrackingSettings | None:
    """From MLflow's own variables; ``tracking_uri`` beats MLFLOW_TRACKING_URI. None where neither is set."""
    environ = os.environ if environ is None else environ
    uri = environ.get("MLFLOW_TRACKING_URI", "") if tracking_uri is None else tracking_uri
    if not uri:
        return None
    return TrackingSettings(
        tracking_uri=uri,
        experiment_name=environ.get("MLFLOW_EXPERIMENT_NAME", ""),
        run_id=environ.get("MLFLOW_RUN_ID", ""),
    )


_PREFIX = "POLLUX_"
_MLFLOW = {"mlflow_tracking_uri": "MLFLOW_TRACKING_URI", "mlflow_run_id": "MLFLOW_RUN_ID"}


def worker_settings(environ: Mapping[str, str] | None = None) -> WorkerSettings | None:
    """Settings of this worker, or None where no driver started it (no ``POLLUX_JOB_ID``).

    Raises DocumentError naming the variable, its value and what is expected.
    """
    environ = os.environ if environ is None else environ
    if not environ.get("POLLUX_JOB_ID"):
        return None
    plain: dict[str, object] = {}
    for field in WorkerSettings.__dataclass_fields__:
        value = environ.get(_MLFLOW.get(field, _PREFIX + field.upper()), "")
        if value == "":
            continue
        if field == "slots":
            plain[field] = value.split(",")
        elif field == "placement":
            try:
                plain[field] = json.loads(value)
            except ValueError:
                raise DocumentError(
                    f"POLLUX_PLACEMENT: no JSON object node -> GPUs (got {value!r})"
                ) from None
        else:
            plain[field] = value
    return from_plain(WorkerSettings, plain)


def environment(settings: WorkerSettings) -> dict[str, str]:
    """The variables that make :func:`worker_settings` give ``settings`` again."""
    environ: dict[str, str] = {}
    for field in WorkerSettings.__dataclass_fields__:
        value = getattr(settings, field)
        if value is None:
            continue
        if field == "slots":
            text = ",".join(str(slot) for slot in value)
        elif field == "placement":
            text = json.dumps(dict(value))
        else:
            text = str(value)
        environ[_MLFLOW.get(field, _PREFIX + field.upper())] = text
    return environ
