"""The link from an Airflow task to its MLflow run."""

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.configuration import conf
from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk.types import TaskInstanceKey


class MLflowRunLink(BaseOperatorLink):
    """Airflow stores the link when a try defers or ends, so it is there while the job trains.

    A run that did not exist yet at that time (MLflow was away) is looked up when the link is opened, by
    the Pollux page.
    """

    name = "MLflow run"

    def get_link(self, operator: Any, *, ti_key: "TaskInstanceKey") -> str:
        if operator.mlflow_run_url:
            return str(operator.mlflow_run_url)
        if operator.job_id:
            base_url = conf.get("api", "base_url", fallback="http://localhost:8080").rstrip("/")
            return f"{base_url}/pollux/jobs/{operator.job_id}/run"
        return ""


def mlflow_run_url(mlflow_url: str, run_id: str) -> str:
    """MLflow's page of a run; it finds the experiment itself."""
    return f"{mlflow_url.rstrip('/')}/#/runs/{quote(run_id, safe='')}"
