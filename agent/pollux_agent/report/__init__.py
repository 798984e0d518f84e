"""Reports and metrics to MLflow: batched, asynchronous, bounded; training is never blocked nor failed by it.

:func:`open_reporter` gives the reporter that fits a worker's settings. Importing this package does not
import mlflow; the reporter's process does, or its thread where there is no driver.
"""

from pollux_agent.report.apart import ReporterApart
from pollux_agent.report.base import NullReporter, Reporter
from pollux_agent.report.reporter import MlflowReporter
from pollux_agent.settings import WorkerSettings

__all__ = ["MlflowReporter", "NullReporter", "Reporter", "ReporterApart", "open_reporter"]


def open_reporter(settings: WorkerSettings | None) -> Reporter:
    """The reporter of this worker: to its MLflow run, or to nowhere where it has none."""
    if settings is None or not settings.mlflow_tracking_uri or not settings.mlflow_run_id:
        return NullReporter()
    return ReporterApart(
        settings.mlflow_tracking_uri,
        settings.mlflow_run_id,
        settings.incarnation,
        unsent=settings.folder.unsent,
    )
