"""The MLflow run of a training that no scheduler started: found, gone on with, or made."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pollux_agent.protocol import Report
from pollux_agent.records import Note
from pollux_agent.report.base import NullReporter, Reporter, RunStatus
from pollux_agent.report.client import connect, in_words, is_passing, without_password
from pollux_agent.report.prior import Earlier
from pollux_agent.report.reporter import MlflowReporter
from pollux_agent.settings import TrackingSettings

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10
_PAUSES_S = (0.5, 1.0, 2.0)
"""Before another try to open the run, where the fault may pass within the timeout."""


def open_run(
    tracking: TrackingSettings | None, *, name: str, incarnation: int, memory: Note | None = None
) -> Reporter:
    """A reporter to the script's own active run, else to the run named in ``tracking`` or in the note
    ``memory``, else to a new one called ``name``, which is noted there; without ``tracking`` to nowhere.

    The script's own run is left open at the end. Where MLflow does not answer, or is busy for longer than
    some seconds, a warning says so and nothing is reported.
    """
    own = _active_run()
    if own is not None:
        uri, run_id = own
        return OpenEnded(MlflowReporter(uri, run_id, incarnation))
    if tracking is None:
        return NullReporter()
    from mlflow.exceptions import MlflowException

    until_s = time.monotonic() + _TIMEOUT_S
    for pause_s in (*_PAUSES_S, math.inf):
        try:
            run_id = _opened(tracking, name, memory)
        except (MlflowException, OSError, ImportError) as error:
            if not is_passing(error) or time.monotonic() + pause_s > until_s:
                logger.warning(
                    "this training is not reported to MLflow: %s", in_words(error, tracking.tracking_uri)
                )
                break
            time.sleep(pause_s)
        else:
            return MlflowReporter(tracking.tracking_uri, run_id, incarnation)
    return NullReporter()


def _opened(tracking: TrackingSettings, name: str, memory: Note | None) -> str:
    """The id of the run, which is running now; raises what MLflow raises."""
    client = connect(tracking.tracking_uri, timeout_s=_TIMEOUT_S)
    run_id = tracking.run_id or _recalled(tracking, memory)
    if run_id:
        client.update_run(run_id, status="RUNNING")
    else:
        run_id = _new_run(client, tracking, name)
        _remember(tracking, run_id, memory)
    return run_id


class OpenEnded:
    """A reporter to a run that is not ours to end."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._reporter.metrics(values, step)

    def report(self, report: Report) -> None:
        self._reporter.report(report)

    def artifact(self, name: str, data: bytes) -> None:
        self._reporter.artifact(name, data)

    def ask_for_earlier(self, give: Callable[[Earlier], None]) -> None:
        self._reporter.ask_for_earlier(give)

    def finish(self, status: RunStatus) -> None:
        """The run stays open."""

    def close(self, timeout_s: float = 10.0) -> bool:
        return self._reporter.close(timeout_s)


def _active_run() -> tuple[str, str] | None:
    """(tracking URI, id) of the run that the script has open, None where it has none or no mlflow."""
    mlflow = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow is not None and hasattr(mlflow, "active_run") else None
    return None if mlflow is None or run is None else (str(mlflow.get_tracking_uri()), str(run.info.run_id))


def _new_run(client: "MlflowClient", tracking: TrackingSettings, name: str) -> str:
    wanted = tracking.experiment_name or "Default"
    experiment = client.get_experiment_by_name(wanted)
    experiment_id = experiment.experiment_id if experiment is not None else client.create_experiment(wanted)
    return str(client.create_run(experiment_id, run_name=name).info.run_id)


def _recalled(tracking: TrackingSettings, memory: Note | None) -> str:
    """The run of an earlier start on the same server, empty if there is none."""
    try:
        noted = json.loads(memory.read()) if memory is not None else {}
    except (OSError, ValueError):
        return ""
    same = isinstance(noted, dict) and noted.get("tracking_uri") == without_password(tracking.tracking_uri)
    return str(noted.get("run_id", "")) if same else ""


def _remember(tracking: TrackingSettings, run_id: str, memory: Note | None) -> None:
    if memory is not None:
        note = {"tracking_uri": without_password(tracking.tracking_uri), "run_id": run_id}
        try:
            memory.write(json.dumps(note).encode())
        except OSError as error:
            logger.warning(
                "a restart will make another MLflow run, since %s is not written: %s", memory, error
            )
