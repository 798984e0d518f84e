"""The scheduling DAG's one task: a cycle, its figures in the log, and the check for orphans."""

import logging
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowException, AirflowSkipException

from pollux.errors import ClusterUnavailable, ConfigError, PolluxError
from pollux.settings import Settings, settings

if TYPE_CHECKING:
    from pollux.cluster.k8s import KubeCluster
    from pollux.cluster.local import LocalCluster
    from pollux.store import ModelStore

STARTUP_S = 15.0
"""Airflow takes up to this long from a run's due time to its task's first line, most of it cold imports."""

_CRON_STEPS = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30)
"""Minutes that divide an hour, so that a cron rule keeps the interval."""


def schedule(config: Settings) -> str | timedelta:
    """A cron rule for whole minutes that divide an hour, at most thirty; else the interval."""
    minutes, rest_s = divmod(config.interval_s, 60)
    if rest_s == 0 and minutes in _CRON_STEPS:
        return "* * * * *" if minutes == 1 else f"*/{int(minutes)} * * * *"
    return config.interval


def task_limit(config: Settings) -> timedelta:
    """No cycle needs as long; one that hangs is killed, so that the next can come."""
    return timedelta(seconds=3 * config.interval_s + config.free_wait_s + 120)


def run_cycle(run_after: datetime, run_id: str, log: logging.Logger) -> dict[str, Any]:
    """One cycle now, for the run that was due at ``run_after``; its figures in short.

    A cycle that decides nothing ends as a skipped task, with the reason in the log: Airflow's own line keeps
    what the exception says to itself.
    """
    from pollux.cluster.opening import open_cluster
    from pollux.cycle import run_once
    from pollux.record import Records
    from pollux.store import ModelStore

    config = settings()
    if not config.mlflow_tracking_uri:
        raise AirflowException("MLFLOW_TRACKING_URI: not set; name the MLflow server that jobs report to")
    try:
        cluster = open_cluster(config)
    except ClusterUnavailable as error:
        log.warning("Skipped: %s", error)
        raise AirflowSkipException(str(error)) from None
    store = ModelStore(
        config.mlflow_tracking_uri,
        experiment=config.experiment,
        decisions_experiment=config.decisions_recorded_in,
        deployment=config.deployment,
    )
    try:
        result = run_once(
            cluster,
            store,
            config,
            now=time.time(),
            due=run_after.timestamp() + STARTUP_S,
            holder=f"{config.deployment}/{run_id}",
            records=Records(config.decisions),
        )
    except ConfigError as error:
        raise AirflowException(str(error)) from None
    if not config.shadow:
        look_for_orphans(cluster, config, log)
        tidy_up(cluster, store, result.unknown_jobs, config, log)
    if result.skipped:
        log.warning("Skipped: %s", result.skipped)
        raise AirflowSkipException(result.skipped)
    log.info("Decision %s, objective %s", result.decision, result.objective)
    for action in result.actions:
        log.info("%s: %s %s", action.job_id, action.outcome, action.message)
    for job_id, why in result.left_out.items():
        log.info("%s was left out: %s", job_id, why)
    if result.unrecorded:
        log.warning("MLflow holds nothing of this decision: %s", result.unrecorded)
    for step, seconds in result.wall_clock_s.items():
        log.info("%s took %.3f s", step, seconds)
    return {"decision": result.decision, "actions": len(result.actions)}


def look_for_orphans(cluster: "LocalCluster | KubeCluster", config: Settings, log: logging.Logger) -> None:
    """End jobs whose task does not come back for them; without Airflow or cluster that waits a cycle."""
    from pollux.airflow_api import AirflowApi
    from pollux.orphans import ask_airflow, end_orphans

    if not config.airflow_url or config.airflow_login is None:
        log.info("POLLUX_AIRFLOW_URL and POLLUX_AIRFLOW_LOGIN are not set: orphaned jobs are not looked for")
        return
    try:
        jobs = [job for job in cluster.observe().jobs if job.identity.deployment == config.deployment]
        with AirflowApi.from_login(config.airflow_url, config.airflow_login) as api:
            state_of = ask_airflow(api, [job.identity for job in jobs])
        ended = end_orphans(
            cluster, jobs, state_of, deployment=config.deployment, memory=config.state / "suspects.json"
        )
    except (PolluxError, OSError) as error:
        log.warning("Orphaned jobs were not looked for: %s", error)
        return
    for job_id, why in ended.items():
        log.warning("Ended %s, an orphan: %s", job_id, why)


def tidy_up(
    cluster: "LocalCluster | KubeCluster",
    store: "ModelStore",
    unknown_jobs: Sequence[str],
    config: Settings,
    log: logging.Logger,
) -> None:
    """Remove driver pods whose job and task are over, and close the runs of ``unknown_jobs`` whose task is
    over; without Airflow, MLflow or cluster that waits.
    """
    from pollux.airflow_api import AirflowApi
    from pollux.leftovers import DriverPods, close_runs, remove_left
    from pollux.orphans import GONE, StateOf, ask_airflow

    if not config.airflow_url or config.airflow_login is None:
        return
    try:
        left = cluster.left(config.deployment) if isinstance(cluster, DriverPods) else {}
        open_runs = store.reports() if unknown_jobs else {}
        runs = {job_id: open_runs[job_id] for job_id in unknown_jobs if job_id in open_runs}
        tasks = [job.identity for job in left.values()]
        tasks += [run.identity for run in runs.values() if run.identity is not None]
        state_of: StateOf = lambda _: GONE  # noqa: E731 - nobody's state is looked at
        if tasks:
            with AirflowApi.from_login(config.airflow_url, config.airflow_login) as api:
                state_of = ask_airflow(api, tasks)
        closed = close_runs(store, runs, state_of, memory=config.state / "unknown.json")
        removed: tuple[str, ...] = ()
        if isinstance(cluster, DriverPods):
            removed = remove_left(cluster, store, left, state_of, memory=config.state / "leftovers.json")
    except (PolluxError, OSError) as error:
        log.warning("What is left of jobs that are over was not looked for: %s", error)
        return
    for job_id in removed:
        log.info("Removed the driver's pod of %s, which is over", job_id)
    for job_id in closed:
        log.warning("Closed the run of %s, which the cluster does not know", job_id)
