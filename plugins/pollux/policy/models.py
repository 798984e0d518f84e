"""What policies share: a job's limit, its goodput models, and which allocations of today still stand."""

from collections.abc import Sequence

import numpy as np

from pollux.policy.tables import Floats, Ints, goodputs, is_adaptive, models_of, params_of
from pollux.snapshot import Job, Node, Snapshot
from pollux_agent.model.goodput import BatchLimits, GoodputModel, best_of_jobs
from pollux_agent.model.throughput import ThroughputParams

_FIELDS = tuple(ThroughputParams.__dataclass_fields__)


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


def best_goodputs(jobs: Sequence[Job], gpu_types: Sequence[str], num_nodes: Ints, num_gpus: Ints) -> Floats:
    """Goodput (J, T, n) of each job on each type of GPU, on ``num_gpus[i]`` GPUs of ``num_nodes[i]`` nodes.

    As :func:`pollux.policy.tables.goodputs`, but that of a training is exact.
    """
    values = np.zeros((len(jobs), len(gpu_types), len(num_gpus)))
    trains = np.array([job.estimator == "training" for job in jobs], dtype=np.bool_)
    models = [model for job in jobs if job.estimator == "training" for model in job_models(job, gpu_types)]
    if models:
        found = best_of_jobs(models, num_nodes, num_gpus).goodput
        values[trains] = found.reshape(-1, len(gpu_types), len(num_gpus))
    others = [job for job in jobs if job.estimator != "training"]
    if others and gpu_types:
        cells = (np.arange(len(others)), np.arange(len(gpu_types)), np.arange(len(num_gpus)))
        job, kind, place = (axis.ravel() for axis in np.meshgrid(*cells, indexing="ij"))
        told = goodputs(models_of(others, gpu_types), job, kind, num_nodes[place], num_gpus[place])
        values[~trains] = told.reshape(len(others), len(gpu_types), len(num_gpus))
    return values


def job_models(job: Job, gpu_types: Sequence[str]) -> list[GoodputModel]:
    """A training's goodput model on each type of GPU, as :func:`pollux.policy.tables.params_of` has it.

    With no usable fit, or no noise scale for an adaptive job, it counts as scaling perfectly.
    """
    limits = [
        BatchLimits(
            initial_batch_size=job.initial_batch_size,
            max_batch_size=max(job.max_batch_size, job.initial_batch_size),
            max_local_batch_size=job.local_limit(kind),
            min_local_batch_size=job.min_local_batch_size,
        )
        for kind in gpu_types
    ]
    adaptive = is_adaptive(job)
    params, fitted = params_of([job], gpu_types)
    if not fitted[0] or (adaptive and job.noise_scale is None):
        return [GoodputModel.unfitted(each, adaptive=adaptive) for each in limits]
    fits = [ThroughputParams(**dict(zip(_FIELDS, each.tolist(), strict=True))) for each in params[0]]
    pairs = zip(fits, limits, strict=True)
    return [GoodputModel(fit, job.noise_scale, each, adaptive) for fit, each in pairs]
