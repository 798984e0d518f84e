"""What the fixed-size baselines know of a job: how fast it is at its request, and what it still needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pollux.policy.models import standing_jobs
from pollux.policy.packing import Room, keeps
from pollux.policy.reasons import in_gpus
from pollux.policy.tables import Floats, Ints, goodputs, models_of
from pollux.snapshot import Decision, JobDecision, Snapshot

UNKNOWN_S = 3600.0
"""Remaining time of a job that does not say where it ends, or whose speed is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Arrays over jobs (J) and GPU types (T).

    ``gpus`` requested, ``rate`` (J, T) work a second where the request fits into the type, else 0,
    ``remaining`` work, ``served_s`` seconds on the request so far, ``age_s``, and ``capacity`` (T) in GPUs.
    """

    types: tuple[str, ...]
    capacity: Ints
    gpus: Ints
    rate: Floats
    remaining: Floats
    served_s: Floats
    age_s: Floats

    @property
    def best_rate(self) -> Floats:
        """Rate (J) on the type where each job is fastest, and at least something."""
        return np.asarray(np.maximum(self.rate.max(axis=1, initial=0.0), 1e-9))

    @property
    def remaining_s(self) -> Floats:
        """Seconds (J) that each job would still take on its request, alone, on its best type."""
        return np.asarray(self.remaining / self.best_rate)

    @property
    def rho(self) -> Floats:
        """Finish-time fairness (J), Themis section 3: time to finish, over that in an equal share.

        A share of n jobs has 1 / n of the GPUs, so a job that asks for more takes longer there in proportion.
        """
        crowd = np.maximum(self.gpus * len(self.gpus) / max(int(self.capacity.sum()), 1), 1.0)
        alone = np.maximum(self.served_s + self.remaining_s, 1.0) * crowd
        return np.asarray((self.age_s + self.remaining_s) / alone)


def requests_of(snapshot: Snapshot) -> Requests:
    """The requests of a snapshot with at least one job and one node."""
    jobs = snapshot.jobs
    types = tuple(sorted({node.gpu_type for node in snapshot.nodes}))
    gpus = np.array([job.min_gpus for job in jobs], dtype=np.int64)
    sizes = {kind: [node.gpus for node in snapshot.nodes if node.gpu_type == kind] for kind in types}
    models, rows = models_of(jobs, types), np.arange(len(jobs))
    rate = np.zeros((len(jobs), len(types)))
    for index, kind in enumerate(types):
        width = max(*sizes[kind], 1)
        usable = np.array([not job.gpu_types or kind in job.gpu_types for job in jobs])
        speed = goodputs(models, rows, np.full(len(jobs), index), -(-gpus // width), gpus)
        rate[:, index] = np.where(usable & (gpus <= sum(sizes[kind])), speed, 0.0)
    work = np.array(
        [
            np.nan
            if job.target_progress is None
            else max(job.target_progress - job.progress, 0.0) * job.initial_batch_size
            for job in jobs
        ]
    )
    unknown = np.isnan(work) | ~models.fitted
    return Requests(
        types=types,
        capacity=np.array([sum(sizes[kind]) for kind in types], dtype=np.int64),
        gpus=gpus,
        rate=rate,
        remaining=np.where(unknown, UNKNOWN_S * rate.max(axis=1), work),
        served_s=np.array([job.attained_gpu_s for job in jobs]) / gpus,
        age_s=np.array([job.age_s for job in jobs]),
    )


def run_in_order(
    snapshot: Snapshot,
    order: Sequence[tuple[int, str]],
    *,
    policy: str,
    objective: float,
    why: Callable[[int], str],
    state: Mapping[str, object],
) -> Decision:
    """Give each (job's row, GPU type) of the order its request while it fits; a job runs once.

    Jobs that run now and are to run on the same type stay where they are; the others are placed after them.
    ``why`` completes a job's reason.
    """
    jobs, pinned = snapshot.jobs, keeps(snapshot)
    kind_of = {node.name: node.gpu_type for node in snapshot.nodes}
    left = dict.fromkeys(kind_of.values(), 0)
    for node in snapshot.nodes:
        left[node.gpu_type] += node.gpus
    granted: dict[int, str] = {}
    for row, job in enumerate(jobs):
        if job.job_id in pinned:
            granted[row] = kind_of[next(iter(job.placement))]
            left[granted[row]] -= job.num_gpus
    for row, kind in order:
        if row not in granted and jobs[row].min_gpus <= left[kind]:
            granted[row] = kind
            left[kind] -= jobs[row].min_gpus
    standing, room = standing_jobs(snapshot), Room(snapshot)
    placements: dict[int, Mapping[str, int]] = {}
    for row, kind in granted.items():
        job = jobs[row]
        stays = job.job_id in standing and kind_of[next(iter(job.placement))] == kind
        if job.job_id in pinned or (stays and job.num_gpus == job.min_gpus):
            placements[row] = job.placement
            room.take(job.placement)
    for row, kind in granted.items():
        if row not in placements:
            placements[row] = room.place(jobs[row], jobs[row].min_gpus, kind)
    answers = {}
    for row, job in enumerate(jobs):
        placement = placements.get(row, {})
        verb = "waits" if not placement else "keeps" if dict(placement) == dict(job.placement) else "runs on"
        gpus = f" {in_gpus(sum(placement.values()))}" if placement else f" for {in_gpus(job.min_gpus)}"
        answers[job.job_id] = JobDecision(placement=placement, reason=f"{verb}{gpus}: {why(row)}")
    return Decision(
        decision=snapshot.decision, policy=policy, objective=objective, jobs=answers, state=dict(state)
    )
