"""Optimus (Peng et al., EuroSys '18): one GPU at a time to the job whose remaining time it shortens most."""

import heapq
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from pollux.policy.models import best_goodputs, job_limit, standing_jobs
from pollux.policy.packing import Room, keeps
from pollux.policy.reasons import in_gpus
from pollux.snapshot import Decision, Job, JobDecision, Snapshot


def decide(snapshot: Snapshot) -> Decision:
    """Marginal gains until none is left, then placement of the jobs whose number of GPUs changed.

    Step times and remaining steps come from each job's ``oracle``; where there is none, from its fit and its
    progress.
    """
    return _decide(snapshot, "optimus")


def decide_scaling(snapshot: Snapshot) -> Decision:
    """The same for jobs whose batch size grows with their GPUs, as Optimus' own jobs' does not.

    There is no oracle: goodput at the best batch size on each number of GPUs comes from the job's fit and
    noise scale, and what remains from the epochs that it declares.
    """
    return _decide(snapshot, "optimus-scaling")


def _decide(snapshot: Snapshot, policy: str) -> Decision:
    counts = _counts(snapshot)
    standing, room = standing_jobs(snapshot), Room(snapshot)
    placements: dict[str, Mapping[str, int]] = {}
    for job in snapshot.jobs:
        if job.job_id in standing and job.num_gpus == counts[job.job_id]:
            placements[job.job_id] = job.placement
            room.take(job.placement)
    for job in sorted(snapshot.jobs, key=lambda job: counts[job.job_id]):
        if job.job_id not in placements:
            placements[job.job_id] = room.place(job, counts[job.job_id])
    answers = {
        job.job_id: JobDecision(
            placement=placements[job.job_id], reason=_reason(job, placements[job.job_id], counts[job.job_id])
        )
        for job in snapshot.jobs
    }
    running = sum(1 for answer in answers.values() if answer.placement)
    return Decision(
        decision=snapshot.decision,
        policy=policy,
        objective=running / max(len(snapshot.jobs), 1),
        jobs=answers,
    )


def _counts(snapshot: Snapshot) -> dict[str, int]:
    """GPUs of each job: its least number in order of submission, then by marginal gain."""
    total = left = sum(node.gpus for node in snapshot.nodes)
    pinned = keeps(snapshot)
    counts = {}
    for job in sorted(snapshot.jobs, key=lambda job: job.job_id not in pinned):
        gpus = job.num_gpus if job.job_id in pinned else job.min_gpus
        counts[job.job_id] = gpus if gpus <= left else 0
        left -= counts[job.job_id]
    gains: list[tuple[float, int]] = []
    width = max((node.gpus for node in snapshot.nodes), default=1)
    curves = {}
    for row, job in enumerate(snapshot.jobs):
        if counts[job.job_id] and job.job_id not in pinned and counts[job.job_id] < job_limit(job):
            curves[row] = _gains(job, max(width, 1), total)
            _push(gains, curves[row], row, counts[job.job_id])
    while gains and left > 0:
        _, row = heapq.heappop(gains)
        job_id = snapshot.jobs[row].job_id
        counts[job_id] += 1
        left -= 1
        _push(gains, curves[row], row, counts[job_id])
    return counts


def _push(gains: list[tuple[float, int]], curve: list[float], row: int, gpus: int) -> None:
    if gpus <= len(curve) and curve[gpus - 1] > 0:
        heapq.heappush(gains, (-curve[gpus - 1], row))


def _gains(job: Job, width: int, most: int) -> list[float]:
    """Seconds of remaining time that GPU number 2, 3, ... saves, on as few nodes of ``width`` as can be."""
    limit = min(job_limit(job), most)
    if job.oracle is not None:
        times, remaining = job.oracle.step_time_s[:limit], job.oracle.remaining_steps
    else:
        gpus = np.arange(1, limit + 1)
        rate = best_goodputs([job], [min(job.estimates, default="")], -(-gpus // width), gpus)[0, 0]
        times = tuple(np.divide(1.0, rate, out=np.full(limit, np.inf), where=rate > 0).tolist())
        goal = job.progress + 1.0 if job.target_progress is None else job.target_progress
        remaining = max(goal - job.progress, 0.0) * job.initial_batch_size
    return [(now - then) * remaining if then < np.inf else 0.0 for now, then in pairwise(times)]


def _reason(job: Job, placement: Mapping[str, int], wanted: int) -> str:
    if not wanted:
        return "waits: earlier jobs have one GPU each first, and none is left"
    if not placement:
        return f"waits: {in_gpus(wanted)} together that may serve it cannot be had"
    if dict(placement) == dict(job.placement):
        return f"keeps {in_gpus(wanted)}: no other number shortens the remaining times more"
    return f"gets {in_gpus(wanted)} (had {job.num_gpus}): each saves it more time than another job"
