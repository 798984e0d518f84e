"""One scheduling cycle a minute (POLLUX_INTERVAL_S): who gets which GPUs, by goodput."""

import logging

from airflow.sdk import DAG, task

from pollux.operators.schedule import run_cycle, schedule, task_limit
from pollux.settings import settings

config = settings()

with DAG(
    "pollux_schedule",
    schedule=schedule(config),
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=False,
    dagrun_timeout=2 * task_limit(config),
    tags=["pollux"],
    doc_md=__doc__,
):

    @task(retries=0, execution_timeout=task_limit(config))
    def cycle(dag_run=None):
        return run_cycle(dag_run.run_after, dag_run.run_id, logging.getLogger("airflow.task"))

    cycle()
