"""First in, first out: each job runs at its request until it ends; nobody overtakes one that waits."""

from collections.abc import Mapping

from pollux.policy.models import standing_jobs
from pollux.policy.packing import Room
from pollux.policy.reasons import in_gpus
from pollux.snapshot import Decision, JobDecision, Snapshot


def decide(snapshot: Snapshot) -> Decision:
    """Running jobs keep their GPUs; the rest start in order of submission until one does not fit."""
    standing, room = standing_jobs(snapshot), Room(snapshot)
    placements: dict[str, Mapping[str, int]] = {}
    for job in snapshot.jobs:
        if job.job_id in standing:
            placements[job.job_id] = job.placement
            room.take(job.placement)
    blocked_by = ""
    answers = {}
    for job in snapshot.jobs:
        placement = placements.get(job.job_id, {})
        if placement:
            reason = f"keeps {in_gpus(job.num_gpus)} until it ends"
        elif blocked_by:
            reason = f"waits behind {blocked_by}"
        elif placement := room.place(job, job.min_gpus):
            reason = f"started on {in_gpus(job.min_gpus)}, the next in order of submission"
        else:
            blocked_by = job.name or job.job_id
            reason = f"waits, and those behind it: {in_gpus(job.min_gpus)} at once cannot be had"
        answers[job.job_id] = JobDecision(placement=placement, reason=reason)
    running = sum(1 for answer in answers.values() if answer.placement)
    return Decision(
        decision=snapshot.decision,
        policy="fifo",
        objective=running / max(len(snapshot.jobs), 1),
        jobs=answers,
    )
