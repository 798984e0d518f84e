"""Tiresias (Gu et al., NSDI '19): jobs of fixed size in two queues by attained GPU time; preemptive."""

from collections.abc import Mapping, Sequence

from pollux.policy.models import standing_jobs
from pollux.policy.packing import Room, keeps
from pollux.policy.reasons import in_gpus
from pollux.snapshot import Decision, Job, JobDecision, Snapshot

DEMOTION_GPU_S = 57_600.0
"""GPU seconds after which a job goes from the first queue to the second; it never comes back."""


def decide(snapshot: Snapshot) -> Decision:
    """Run jobs in queue order as long as the whole request of one fits into what is left.

    The first queue is in order of submission, the second in order of demotion, which the decision's state
    remembers. A job's request is its least number of GPUs.
    """
    demoted = _demoted(snapshot)
    second = {job_id: turn for turn, job_id in enumerate(demoted)}
    pinned, standing = keeps(snapshot), standing_jobs(snapshot)
    queue = sorted(
        snapshot.jobs,
        key=lambda job: (job.job_id not in pinned, job.job_id in second, second.get(job.job_id, 0)),
    )
    left = sum(node.gpus for node in snapshot.nodes)
    runs: list[Job] = []
    for job in queue:
        gpus = job.num_gpus if job.job_id in pinned else job.min_gpus
        if gpus <= left:
            runs.append(job)
            left -= gpus
    room = Room(snapshot)
    placements: dict[str, Mapping[str, int]] = {}
    for job in runs:
        if job.job_id in pinned or (job.job_id in standing and job.num_gpus == job.min_gpus):
            placements[job.job_id] = job.placement
            room.take(job.placement)
    for job in runs:
        if job.job_id not in placements:
            placements[job.job_id] = room.place(job, job.min_gpus)
    answers = {
        job.job_id: JobDecision(
            placement=placements.get(job.job_id, {}),
            reason=_reason(job, placements.get(job.job_id, {}), 2 if job.job_id in second else 1),
        )
        for job in snapshot.jobs
    }
    running = sum(1 for answer in answers.values() if answer.placement)
    return Decision(
        decision=snapshot.decision,
        policy="tiresias",
        objective=running / max(len(snapshot.jobs), 1),
        jobs=answers,
        state={"demoted": list(demoted)},
    )


def _demoted(snapshot: Snapshot) -> Sequence[str]:
    """Ids of the jobs in the second queue, in order of demotion; those that left now come last."""
    active = {job.job_id for job in snapshot.jobs}
    remembered = snapshot.state.get("demoted", ())
    earlier = remembered if isinstance(remembered, list | tuple) else ()
    order = [job_id for job_id in earlier if isinstance(job_id, str) and job_id in active]
    known = set(order)
    order += [
        job.job_id
        for job in snapshot.jobs
        if job.job_id not in known and job.attained_gpu_s >= DEMOTION_GPU_S
    ]
    return list(dict.fromkeys(order))


def _reason(job: Job, placement: Mapping[str, int], queue: int) -> str:
    hours = job.attained_gpu_s / 3600
    where = f"in queue {queue}, {hours:.1f} GPU hours served"
    if placement:
        verb = "keeps" if dict(placement) == dict(job.placement) else "runs on"
        return f"{verb} {in_gpus(sum(placement.values()))}; {where}"
    verb = "preempted" if job.placement else "waits"
    return f"{verb}: {in_gpus(job.min_gpus)} at once cannot be had behind the jobs before it; {where}"
