"""Who has to get GPUs whatever the objective says: reservations, and jobs that waited for too many rounds."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pollux.policy.options import Options, is_reserved
from pollux.policy.tables import Bools, Ints
from pollux.snapshot import Job, Snapshot

PATIENCE_ROUNDS = 5
"""A job that has waited for so many rounds gets its least, where the cluster has that for every job."""

_REMEMBERED = 500


def waiting_rounds(snapshot: Snapshot) -> Ints:
    """How many rounds each job (J) has been without GPUs, this one included; from the state, else its age."""
    told = snapshot.state.get("waiting")
    remembered = told if isinstance(told, Mapping) else {}
    return np.array([_rounds(snapshot, job, remembered) for job in snapshot.jobs], dtype=np.int64)


def _rounds(snapshot: Snapshot, job: Job, remembered: Mapping[str, Any]) -> int:
    if job.placement:
        return 0
    rounds = remembered.get(job.job_id)
    if isinstance(rounds, int) and not isinstance(rounds, bool) and 0 <= rounds < 2**31:
        return rounds + 1
    if job.max_gpus_seen:
        return 1
    return 1 + min(int(job.age_s / max(snapshot.interval_s, 1.0)), 2**30)


def remember(snapshot: Snapshot, rounds: Ints, granted: Bools) -> dict[str, Any]:
    """The state to keep: the rounds of those who still wait, the longest first if there are too many."""
    rows = np.flatnonzero(~granted)
    rows = rows[np.argsort(-rounds[rows], kind="stable")][:_REMEMBERED]
    return {"waiting": {snapshot.jobs[row].job_id: int(rounds[row]) for row in sorted(rows.tolist())}}


def must_get(snapshot: Snapshot, options: Options, rounds: Ints) -> Bools:
    """The jobs (J) that have to get an option; together they always can.

    Reservations come first, then those who waited longest, but the latter only where every job that could
    have any could have its least number of GPUs.
    """
    jobs = snapshot.jobs
    movable = ~options.present.pinned
    reserved = np.array([is_reserved(job, snapshot.now_unix_s) for job in jobs], dtype=np.bool_) & movable
    must = np.zeros(len(jobs), dtype=np.bool_)
    least = np.array([job.min_gpus for job in jobs], dtype=np.int64)
    can = movable & np.isin(np.arange(len(jobs)), options.job)
    all_fit = int(least[can].sum()) <= int(options.hardware.free.sum())
    starving = movable & ~reserved & (rounds > PATIENCE_ROUNDS) & all_fit
    left = options.limit.copy()
    entries = np.argsort(options.entry_option, kind="stable")
    bounds = np.searchsorted(options.entry_option[entries], np.arange(len(options.job) + 1))
    for row in [*np.flatnonzero(reserved), *_longest_first(starving, rounds)]:
        first, last = np.searchsorted(options.job, [row, row + 1])
        for option in sorted(range(first, last), key=lambda option: (int(options.gpus[option]), option)):
            entry = entries[bounds[option] : bounds[option + 1]]
            rows, amounts = options.entry_row[entry], options.entry_amount[entry]
            if np.all(amounts <= left[rows]):
                left[rows] -= amounts
                must[row] = True
                break
    return must


def _longest_first(starving: Bools, rounds: Ints) -> list[int]:
    rows = np.flatnonzero(starving)
    return [int(row) for row in rows[np.argsort(-rounds[rows], kind="stable")]]
