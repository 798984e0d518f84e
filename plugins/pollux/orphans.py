"""Jobs whose Airflow task will never come back for them: found by asking Airflow, and ended.

A task that is marked failed ends its job by its trigger. If the triggerer was down just then, or a task used
up its retries while the cluster was away, the job would train for nobody. A job is an orphan when two cycles
in a row saw its task in no state that leads back to it.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pollux.airflow_api import AirflowApi, TaskInstance
from pollux.cluster.base import ClusterJob, JobControl, JobIdentity
from pollux.errors import ClusterError
from pollux_agent.records import write_atomic

logger = logging.getLogger(__name__)

ALIVE_STATES = frozenset(
    {
        "scheduled",
        "queued",
        "running",
        "restarting",
        "up_for_retry",
        "up_for_reschedule",
        "deferred",
        "awaiting_input",
        "none",
    }
)
"""States from which Airflow still comes back to a task; ``none``: not scheduled yet, or cleared."""

GONE = "gone"
"""The state of a task that Airflow does not have."""

LEFT = "left in a run that is over"
"""One that was not scheduled when its run ended, such as a task that is cleared in that moment: Airflow does
not look at it again until somebody clears it."""

StateOf = Callable[[JobIdentity], str]


def ask_airflow(api: AirflowApi, tasks: Iterable[JobIdentity]) -> StateOf:
    """The states of jobs' tasks as Airflow tells them now; raises AirflowUnavailable, AirflowApiError.

    One that the common question did not find is asked for by itself: a user who may not read a DAG gets a
    shorter list there and a refusal here, and tasks that change between two pages can drop out.
    """
    identities = list(tasks)
    found: tuple[TaskInstance, ...] = ()
    if identities:
        found = api.find_task_instances(
            dag_ids={identity.dag_id for identity in identities},
            run_ids={identity.run_id for identity in identities},
            task_ids={identity.task_id for identity in identities},
        )
    states = {_key(ti): ti.state or "none" for ti in found}
    for identity in identities:
        if _key(identity) not in states:
            ti = api.task_instance(identity.dag_id, identity.run_id, identity.task_id, identity.map_index)
            states[_key(identity)] = (ti.state or "none") if ti else GONE
        if states[_key(identity)] == "none" and api.dag_run(identity.dag_id, identity.run_id).is_final:
            states[_key(identity)] = LEFT
    return lambda identity: states.get(_key(identity), GONE)


def _key(of: JobIdentity | TaskInstance) -> tuple[str, str, str, int]:
    return of.dag_id, of.run_id, of.task_id, of.map_index


def suspects(jobs: Iterable[ClusterJob], state_of: StateOf, deployment: str) -> dict[str, str]:
    """Job id -> state of its task, for every job of this deployment whose task leads nowhere."""
    found = {}
    for job in jobs:
        if job.identity.deployment != deployment or job.status.stop is not None:
            continue
        state = state_of(job.identity)
        if state not in ALIVE_STATES:
            found[job.job_id] = state
    return found


def end_orphans(
    control: JobControl, jobs: Iterable[ClusterJob], state_of: StateOf, *, deployment: str, memory: Path
) -> dict[str, str]:
    """End the suspects that were suspects in the last cycle too; those that were ended, with why.

    ``memory`` is the file with the last cycle's suspects.
    """
    ended = {}
    for job_id, state in seen_twice(suspects(jobs, state_of, deployment), memory).items():
        try:
            control.stop(job_id, "orphan")
        except ClusterError as error:
            logger.warning("Orphan %s could not be ended, the next cycle tries again: %s", job_id, error)
            continue
        ended[job_id] = f"its task is {state}, seen so in two cycles"
    return ended


def seen_twice(now: Mapping[str, str], memory: Path) -> dict[str, str]:
    """Those of ``now`` whose key was there in the last cycle too, which the file ``memory`` tells; it then
    holds this cycle's. Losing it only puts a finding off by one cycle.
    """
    before = _remembered(memory)
    write_atomic(memory, json.dumps(sorted(now)).encode())
    return {key: why for key, why in now.items() if key in before}


def _remembered(memory: Path) -> frozenset[str]:
    try:
        return frozenset(map(str, json.loads(memory.read_bytes())))
    except (OSError, ValueError, TypeError):
        return frozenset()
