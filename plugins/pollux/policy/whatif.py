"""Why one job gets what it gets: what each configuration is worth to it, and which rule binds."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pollux.errors import SnapshotError
from pollux.policy.models import job_limit
from pollux.policy.options import Options, is_reserved, options_of
from pollux.policy.problem import realloc_factor
from pollux.snapshot import DEFAULT_RESTART_S, Decision, Job, Snapshot
from pollux_agent.protocol import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A configuration that the job may have, what it is worth, and whether it is today's or decided."""

    nodes: int
    gpus: int
    gpu_type: str
    goodput: float
    speedup: float
    now: bool
    decided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """``reason`` is the decision's own sentence, ``binding`` names the rule that keeps the job from more.

    ``goodput`` is in samples a second where ``fitted``, else in GPUs of perfect scaling; where a policy says
    none it is that of the configuration. ``restart_factor`` is what Pollux and Sia leave of its goodput after
    a change, ``restart_s`` what a restart takes.
    """

    job_id: str
    reason: str
    binding: str
    fitted: bool
    goodput_now: float | None
    goodput: float | None
    speedup: float | None
    restart_factor: float
    restart_s: float
    alternatives: tuple[Alternative, ...]


def explain_job(snapshot: Snapshot, decision: Decision, job_id: str) -> Explanation:
    """Explain one job of a decision; raises SnapshotError for a job that the snapshot does not have."""
    rows = {job.job_id: row for row, job in enumerate(snapshot.jobs)}
    names = {job.name: job.job_id for job in snapshot.jobs if job.name}
    row = rows.get(names.get(job_id, job_id))
    if row is None:
        raise SnapshotError(f"job {job_id!r} is not in the snapshot; it has {', '.join(rows) or 'no jobs'}")
    job = snapshot.jobs[row]
    answer = decision.jobs[job.job_id]
    options = options_of(snapshot) if any(node.gpus for node in snapshot.nodes) else None
    alternatives = () if options is None else _alternatives(snapshot, decision, options, row)
    return Explanation(
        job_id=job.job_id,
        reason=answer.reason,
        binding=_binding(snapshot, decision, job, options, row),
        fitted=bool(options is not None and options.fitted[row]),
        goodput_now=answer.goodput_now or _worth(job.placement, (a for a in alternatives if a.now)),
        goodput=answer.goodput or _worth(answer.placement, (a for a in alternatives if a.decided)),
        speedup=answer.speedup,
        restart_factor=realloc_factor(job),
        restart_s=DEFAULT_RESTART_S if job.restart_s is None else job.restart_s,
        alternatives=alternatives,
    )


def _worth(placement: Placement, same: Iterable[Alternative]) -> float | None:
    """Goodput of a placement that is one of the configurations; 0 without GPUs, None where it is none."""
    return next((each.goodput for each in same), None) if placement else 0.0


def _alternatives(
    snapshot: Snapshot, decision: Decision, options: Options, row: int
) -> tuple[Alternative, ...]:
    job = snapshot.jobs[row]
    answer = decision.jobs[job.job_id]
    fair = float(options.fair[row])
    if answer.goodput and answer.speedup:  # the policy's own idea of a fair share
        fair = answer.goodput / answer.speedup
    now, then = _shape(snapshot, job.placement), _shape(snapshot, answer.placement)
    worth = {}
    for option in np.flatnonzero(options.job == row):
        kind = options.hardware.types[int(options.kind[option])]
        worth[int(options.nodes[option]), int(options.gpus[option]), kind] = float(options.goodput[option])
    for shape, goodput in ((now, answer.goodput_now), (then, answer.goodput)):
        if shape is not None and goodput:  # a policy may give others than the usual ones
            worth.setdefault(shape, goodput)
    return tuple(
        Alternative(
            nodes=shape[0],
            gpus=shape[1],
            gpu_type=shape[2],
            goodput=goodput,
            speedup=goodput / fair,
            now=shape == now,
            decided=shape == then,
        )
        for shape, goodput in sorted(worth.items(), key=lambda item: (item[0][2], item[0][1], item[0][0]))
    )


def _shape(snapshot: Snapshot, placement: Placement) -> tuple[int, int, str] | None:
    kinds = {node.name: node.gpu_type for node in snapshot.nodes}
    if not placement or not set(placement) <= set(kinds):
        return None
    return len(placement), sum(placement.values()), kinds[next(iter(placement))]


def _binding(snapshot: Snapshot, decision: Decision, job: Job, options: Options | None, row: int) -> str:
    """The first of the rules that keep the job from getting more."""
    gpus = sum(decision.jobs[job.job_id].placement.values())
    if options is None:
        return "the cluster has no GPU to give"
    if options.present.pinned[row]:
        why = "its reservation" if is_reserved(job, snapshot.now_unix_s) else "that it may not be preempted"
        return f"{why}: it keeps exactly what it holds"
    mine = np.flatnonzero(options.job == row)
    if not len(mine):
        return _impossible(job, options)
    if gpus >= job.max_gpus:
        return f"max_gpus {job.max_gpus}: its spec asks for no more"
    limit = job_limit(job)
    if gpus >= limit and not job.max_gpus_seen:
        return f"the growth limit: it has not run yet, so it starts on {_gpus(limit)}"
    if gpus >= limit:
        return f"the growth limit: at most twice the {_gpus(job.max_gpus_seen)} seen so far, so {limit} now"
    best = float(options.goodput[mine].max())
    held = decision.jobs[job.job_id].goodput
    if gpus and held is not None and best <= held * 1.01:
        return "its own scaling: no configuration that it may have would make it more than 1 % faster"
    given = sum(sum(other.placement.values()) for other in decision.jobs.values())
    if given >= options.hardware.total:
        return "the GPUs: all are given, and what it would gain is less than what the others would lose"
    quota = snapshot.quotas.get(job.team)
    if quota is not None:
        return f"the quota of team {job.team!r}, {quota} GPUs, or what a restart would cost it"
    return "what a restart would cost it, or that no configuration fits into the GPUs that are free"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _impossible(job: Job, options: Options) -> str:
    there = options.hardware.types
    kinds = [kind for kind in there if not job.gpu_types or kind in job.gpu_types]
    if not kinds:
        return f"GPU types: it takes {', '.join(job.gpu_types)}, and the cluster has {', '.join(there)}"
    return (
        f"its bounds: no configuration of {', '.join(kinds)} has between min_gpus {job.min_gpus} and the "
        f"{job_limit(job)} GPUs that it may have now, or its batch size cannot be split so"
    )
