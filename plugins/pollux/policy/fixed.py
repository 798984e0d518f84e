"""The simplest policy: jobs in order of submission get their least number of GPUs and keep them."""

from collections.abc import Mapping

from pollux.policy.models import accepts, standing_jobs
from pollux.policy.reasons import in_gpus
from pollux.snapshot import Decision, Job, JobDecision, Node, Snapshot


def decide(snapshot: Snapshot) -> Decision:
    """First come, first served; a job that does not fit waits, and later ones may run before it.

    A job on one node shares nodes freely; one that has to span nodes gets nodes without another such job.
    """
    free = {node.name: node.gpus for node in snapshot.nodes}
    shared: set[str] = set()
    standing = standing_jobs(snapshot)
    placements: dict[str, Mapping[str, int]] = {}
    for job in sorted(snapshot.jobs, key=lambda job: job.job_id not in standing):
        keeps = job.job_id in standing
        placement = job.placement if keeps else _place(job, snapshot.nodes, free, shared)
        placements[job.job_id] = placement
        for name, gpus in placement.items():
            free[name] -= gpus
        if len(placement) > 1:
            shared.update(placement)
    running = sum(1 for placement in placements.values() if placement)
    return Decision(
        decision=snapshot.decision,
        policy="fifo-fixed",
        objective=running / max(len(snapshot.jobs), 1),
        jobs={
            job.job_id: JobDecision(
                placement=placements[job.job_id], reason=_reason(job, placements[job.job_id])
            )
            for job in snapshot.jobs
        },
    )


def _place(job: Job, nodes: tuple[Node, ...], free: dict[str, int], shared: set[str]) -> dict[str, int]:
    """The job's least number of GPUs on the fewest nodes of one type, or {} if they are not free."""
    usable = [node for node in nodes if accepts(job, node) and free[node.name] > 0]
    whole = [node for node in usable if free[node.name] >= job.min_gpus]
    if whole:
        return {min(whole, key=lambda node: free[node.name]).name: job.min_gpus}
    for kind in sorted({node.gpu_type for node in usable}):
        placement: dict[str, int] = {}
        rest = job.min_gpus
        same = [node for node in usable if node.gpu_type == kind and node.name not in shared]
        for node in sorted(same, key=lambda node: -free[node.name]):
            placement[node.name] = min(rest, free[node.name])
            rest -= placement[node.name]
            if rest == 0:
                return placement
    return {}


def _reason(job: Job, placement: Mapping[str, int]) -> str:
    gpus = sum(placement.values())
    if not gpus:
        return f"waits: {in_gpus(job.min_gpus)} at once cannot be had"
    if placement == job.placement:
        return f"keeps {in_gpus(gpus)}: this policy never changes a running job"
    return f"started on {in_gpus(gpus)}, its least number"
