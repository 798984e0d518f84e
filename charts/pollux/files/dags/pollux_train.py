"""Trains one job. Trigger it from the UI with the form, or over REST with the same fields as ``conf``."""

from airflow.sdk import DAG

from pollux.operators.form import job_form, spec_from_form
from pollux.operators.training import PolluxTrainingOperator

with DAG(
    "pollux_train",
    schedule=None,
    params=job_form(),
    is_paused_upon_creation=False,
    max_active_runs=500,
    tags=["pollux"],
    doc_md=__doc__,
):
    PolluxTrainingOperator(task_id="train", spec=spec_from_form, fresh="{{ params.fresh }}")
