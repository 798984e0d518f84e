"""Driver pods that nobody needs any more: their job is over, and so is its Airflow task.

A task removes its job's pod with its last verdict. Where it could not, MLflow being away or the driver still
busy with sending it the last figures, and where a person ended the job, so that no task comes back for it,
the scheduling cycle does.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pollux.cluster.base import ClusterJob
from pollux.errors import ClusterUnavailable, PolluxError, StoreUnavailable, UnknownJob
from pollux.jobruns import close_run
from pollux.orphans import ALIVE_STATES, StateOf, seen_twice
from pollux.store import ModelStore

logger = logging.getLogger(__name__)


class DriverPods(Protocol):
    """What this needs of a cluster whose jobs leave pods behind."""

    def remove(self, job_id: str, *, uid: str = "") -> None: ...


def remove_left(
    pods: DriverPods,
    store: ModelStore,
    left: Mapping[str, ClusterJob],
    state_of: StateOf,
    *,
    memory: Path,
) -> tuple[str, ...]:
    """Record and remove what was left in the last cycle too; the ids of those jobs.

    ``left`` are jobs that are over by their pods' uids, and ``memory`` the file with the last cycle's. One
    that cannot be removed is named in the log. Raises StoreUnavailable and ClusterUnavailable.
    """
    tasks = {uid: state_of(job.identity) for uid, job in left.items()}
    over = {uid: state for uid, state in tasks.items() if state not in ALIVE_STATES}
    due = {uid: left[uid] for uid in seen_twice(over, memory)}
    open_runs = store.reports() if due else {}
    removed = []
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
            logger.warning("The driver's pod of %s stays: %s", job.job_id, error)
            continue
        removed.append(job.job_id)
    return tuple(removed)
