"""What is left of jobs whose Airflow task is over: driver pods that nobody needs any more, and open runs.

A task removes its job's pod with its last verdict. Where it could not, MLflow being away or the driver still
busy with sending it the last figures, and where a person ended the job, so that no task comes back for it,
the scheduling cycle does. It also closes the run of a job that the cluster does not know: one that could not
be submitted in all of its tries, or whose pod somebody removed.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from pollux.cluster.base import ClusterJob
from pollux.errors import ClusterUnavailable, PolluxError, StoreUnavailable, UnknownJob
from pollux.jobruns import close_run
from pollux.orphans import ALIVE_STATES, StateOf, seen_twice
from pollux.store import JobRecord, ModelStore, RunStatus

logger = logging.getLogger(__name__)


@runtime_checkable
class DriverPods(Protocol):
    """A cluster whose jobs leave pods behind. Each method raises ClusterError."""

    def left(self, deployment: str) -> Mapping[str, ClusterJob]:
        """A deployment's jobs that are over and have a pod that was not to stay, by the pod's uid."""
        ...

    def remove(self, job_id: str, *, uid: str = "") -> None:
        """Remove a job's pod, with ``uid`` no other; raises UnknownJob if there is none."""
        ...


def remove_left(
    pods: DriverPods,
    store: ModelStore,
    left: Mapping[str, ClusterJob],
    state_of: StateOf,
    *,
    memory: Path,
) -> tuple[str, ...]:
    """Record and remove what was left in the last cycle too; the ids of those jobs.

    ``left`` are jobs that are over by their pods' uids, and ``memory`` the file with the last cycle's. That
    some cannot be removed is told in the log. Raises StoreUnavailable and ClusterUnavailable.
    """
    tasks = {uid: state_of(job.identity) for uid, job in left.items()}
    over = {uid: state for uid, state in tasks.items() if state not in ALIVE_STATES}
    due = {uid: left[uid] for uid in seen_twice(over, memory)}
    open_runs = store.reports() if due else {}
    removed = []
    kept: dict[str, PolluxError] = {}
    for uid, job in due.items():
        try:
            if job.job_id in open_runs:
                close_run(store, job)
            pods.remove(job.job_id, uid=uid)
        except UnknownJob:
            continue
        except (StoreUnavailable, ClusterUnavailable):
            raise
        except PolluxError as error:
            kept[job.job_id] = error
            continue
        removed.append(job.job_id)
    if kept:
        job_id, why = next(iter(kept.items()))
        logger.warning("%d driver pods stay, the first one that of %s: %s", len(kept), job_id, why)
    return tuple(removed)


def close_runs(
    store: ModelStore, runs: Mapping[str, JobRecord], state_of: StateOf, *, memory: Path
) -> tuple[str, ...]:
    """Close the open runs, by job, of jobs that the cluster does not know and whose task is over, as it was
    in the last cycle; the ids of those jobs. Raises StoreError.
    """
    tasks = {job_id: state_of(run.identity) for job_id, run in runs.items() if run.identity is not None}
    over = {job_id: state for job_id, state in tasks.items() if state not in ALIVE_STATES}
    closed = []
    for job_id, state in seen_twice(over, memory).items():
        why = f"the cluster does not know the job, and its task is {state}"
        status: RunStatus = "FINISHED" if state == "success" else "KILLED"
        store.close_run(runs[job_id].run_id, status, how="unknown", message=why)
        closed.append(job_id)
    return tuple(closed)
