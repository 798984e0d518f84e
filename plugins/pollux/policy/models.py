"""What policies share: a job's limit, its goodput models, and which allocations of today still stand."""

from collections.abc import Sequence

from pollux.snapshot import Job, Node, Snapshot
from pollux_agent.model.goodput import BatchLimits, GoodputModel
from pollux_agent.model.throughput import ThroughputParams, grad_time, is_sane

_NO_FIT = ThroughputParams(
    alpha_grad=0.0,
    beta_grad=0.0,
    alpha_sync_local=0.0,
    beta_sync_local=0.0,
    alpha_sync_node=0.0,
    beta_sync_node=0.0,
    gamma=1.0,
)


def accepts(job: Job, node: Node) -> bool:
    """Whether the job may run on the node's type of GPU."""
    return not job.gpu_types or node.gpu_type in job.gpu_types


def standing_jobs(snapshot: Snapshot) -> frozenset[str]:
    """Jobs that hold GPUs which are all still there, of one type that they accept.

    Where a node lost GPUs, those that may not be preempted and earlier ones keep theirs first.
    """
    nodes = {node.name: node for node in snapshot.nodes}
    free = {node.name: node.gpus for node in snapshot.nodes}
    standing = set()
    for job in sorted(snapshot.jobs, key=lambda job: job.preemptible):
        fits = all(gpus <= free.get(name, 0) for name, gpus in job.placement.items())
        if not job.placement or not fits:
            continue
        held = [nodes[name] for name in job.placement]
        if len({node.gpu_type for node in held}) == 1 and accepts(job, held[0]):
            standing.add(job.job_id)
            for name, gpus in job.placement.items():
                free[name] -= gpus
    return frozenset(standing)


def job_limit(job: Job) -> int:
    """Most GPUs the job may get: its growth limit, but what it holds within its bounds stays allowed."""
    return max(job.gpu_limit, min(job.num_gpus, job.max_gpus))


def job_params(job: Job, gpu_types: Sequence[str]) -> list[ThroughputParams]:
    """The job's throughput parameters on each type of GPU; not sane ones where it has no usable fit.

    On a type where nothing was measured it counts as it does on one where it ran. On a type where only one
    GPU was measured, synchronisation is as long, relative to computing, as on the type where most were.
    """
    fits = {kind: params for kind, params in sorted(job.fits.items()) if is_sane(params)}
    if not fits:
        return [_NO_FIT] * len(gpu_types)
    known = max(fits, key=lambda kind: job.gpus_seen.get(kind, 0))
    if job.gpus_seen.get(known, 0) > 1:
        fits |= {
            kind: _synchronised(params, fits[known], job)
            for kind, params in fits.items()
            if job.gpus_seen.get(kind, 0) <= 1
        }
    return [fits.get(kind, fits[known]) for kind in gpu_types]


def _synchronised(params: ThroughputParams, known: ThroughputParams, job: Job) -> ThroughputParams:
    """Parameters of one GPU, with the synchronisation of another type.

    Sia Eq. 1, xput_B(N) = xput_B(1) / xput_A(1) xput_A(N), for the local batch size that fits in memory.
    """
    local = max(job.max_local_batch_size, job.min_local_batch_size)
    ratio = float(grad_time(params, local) / grad_time(known, local))
    scaled = ThroughputParams(
        alpha_grad=params.alpha_grad,
        beta_grad=params.beta_grad,
        alpha_sync_local=known.alpha_sync_local * ratio,
        beta_sync_local=known.beta_sync_local * ratio,
        alpha_sync_node=known.alpha_sync_node * ratio,
        beta_sync_node=known.beta_sync_node * ratio,
        gamma=known.gamma,
    )
    return scaled if is_sane(scaled) else params


def job_models(job: Job, gpu_types: Sequence[str]) -> list[GoodputModel]:
    """The job's goodput model on each type of GPU, from :func:`job_params`.

    With no usable fit, or no noise scale for an adaptive job, it counts as scaling perfectly.
    """
    limits = BatchLimits(
        initial_batch_size=job.initial_batch_size,
        max_batch_size=max(job.max_batch_size, job.initial_batch_size),
        max_local_batch_size=max(job.max_local_batch_size, job.min_local_batch_size),
        min_local_batch_size=job.min_local_batch_size,
    )
    adaptive = job.kind in ("adaptive", "hybrid_parallel")
    params = job_params(job, gpu_types)
    if not all(is_sane(each) for each in params) or (adaptive and job.noise_scale is None):
        return [GoodputModel.unfitted(limits, adaptive=adaptive) for _ in gpu_types]
    return [GoodputModel(each, job.noise_scale, limits, adaptive) for each in params]


def is_fitted(job: Job) -> bool:
    """Whether the job's goodput can be predicted in samples per second."""
    known = job.noise_scale is not None or job.kind not in ("adaptive", "hybrid_parallel")
    return known and any(is_sane(params) for params in job.fits.values())
