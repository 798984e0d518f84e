"""Why one job gets what it gets: what each configuration is worth to it, and which rule binds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from pollux.errors import SnapshotError
from pollux.policy import HEED_CLAIMS, ours
from pollux.policy.ablation import EVERY_SAMPLE_COUNTS
from pollux.policy.models import best_goodputs, job_limit
from pollux.policy.options import Options, is_reserved, options_of
from pollux.policy.reasons import in_gpus
from pollux.policy.tables import Ints, models_of
from pollux.snapshot import DEFAULT_RESTART_S, Decision, Job, Snapshot
from pollux_agent.protocol import Placement

_FASTER = 1.01
"""A configuration that is better by less is none that a job misses."""

_LISTED = 20
"""So many jobs are named where none, or not one alone, is meant."""


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
    none it is that of the configuration. ``restart_s`` is what a restart takes, ``restart_factor`` as how
    much of its goodput the policy therefore counts a change, None where it prices no restarts.
    """

    job_id: str
    reason: str
    binding: str
    fitted: bool
    goodput_now: float | None
    goodput: float | None
    speedup: float | None
    restart_factor: float | None
    restart_s: float
    alternatives: tuple[Alternative, ...]


def explain_job(snapshot: Snapshot, decision: Decision, job_id: str) -> Explanation:
    """Explain one job of a decision, named by its id or else by its name.

    Raises SnapshotError for a job that the snapshot does not have, or has twice by that name.
    """
    row = _row(snapshot, job_id)
    job = snapshot.jobs[row]
    answer = decision.jobs[job.job_id]
    seen = snapshot
    if decision.policy not in HEED_CLAIMS:  # such a policy moves reserved and restarting jobs too
        seen = replace(snapshot, jobs=tuple(_without_claims(each) for each in snapshot.jobs))
    growth = ours.noise_growth(snapshot) if decision.policy == "ours" else np.ones(len(snapshot.jobs))
    options = options_of(seen, noise_growth=growth) if any(node.gpus for node in snapshot.nodes) else None
    if job.noise_scale is not None:
        job = replace(job, noise_scale=min(job.noise_scale * float(growth[row]), EVERY_SAMPLE_COUNTS))
    alternatives = () if options is None else _alternatives(snapshot, decision, options, row)
    return Explanation(
        job_id=job.job_id,
        reason=answer.reason,
        binding=_binding(snapshot, decision, job, options, row),
        fitted=bool(models_of([job], ("",)).fitted[0]),
        goodput_now=answer.goodput_now or _worth(job.placement, (a for a in alternatives if a.now)),
        goodput=answer.goodput or _worth(answer.placement, (a for a in alternatives if a.decided)),
        speedup=answer.speedup,
        restart_factor=answer.restart_factor,
        restart_s=DEFAULT_RESTART_S if job.restart_s is None else job.restart_s,
        alternatives=alternatives,
    )


def _row(snapshot: Snapshot, wanted: str) -> int:
    """Which job is meant."""
    ids = [job.job_id for job in snapshot.jobs]
    if wanted in ids:
        return ids.index(wanted)
    rows = [row for row, job in enumerate(snapshot.jobs) if job.name and job.name == wanted]
    if len(rows) == 1:
        return rows[0]
    if rows:
        raise SnapshotError(
            f"{len(rows)} jobs are named {wanted!r}; give the id of one: {_some(ids[row] for row in rows)}"
        )
    raise SnapshotError(f"job {wanted!r} is not in the snapshot; it has {_some(ids)}")


def _some(ids: Iterable[str]) -> str:
    first = list(islice(ids, _LISTED + 1))
    return ", ".join(first[:_LISTED]) + (", ..." if len(first) > _LISTED else "") or "no jobs"


def _without_claims(job: Job) -> Job:
    return replace(job, reserved_from_unix_s=None, reserved_until_unix_s=None, restarting=False)


def _pin(snapshot: Snapshot, job: Job) -> str:
    """What keeps a pinned job where it is."""
    if not job.preemptible:
        return "that it may not be preempted"
    if is_reserved(job, snapshot.now_unix_s) and job.num_gpus >= job.min_gpus:
        return "its reservation"
    return "its restart, which is not over"


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
        return f"{_pin(snapshot, job)}: it keeps exactly what it holds"
    mine = np.flatnonzero(options.job == row)
    if not len(mine):
        return _impossible(job, options)
    if gpus >= job.max_gpus:
        return f"max_gpus {job.max_gpus}: its spec asks for no more"
    limit = job_limit(job)
    if gpus >= limit and not job.max_gpus_seen:
        return f"the growth limit: it has not run yet, so it starts on {in_gpus(limit)}"
    if gpus >= limit:
        return f"the growth limit: at most twice the {in_gpus(job.max_gpus_seen)} seen so far, so {limit} now"
    held = _held(snapshot, decision, job, options, row)
    best = float(options.goodput[mine].max())
    if gpus and held and best <= held * _FASTER:
        return _no_better(decision, job, options, held)
    given = sum(sum(other.placement.values()) for other in decision.jobs.values())
    if given >= sum(node.gpus for node in snapshot.nodes):
        return "the GPUs: all are given, and what it would gain is less than what the others would lose"
    return _left_unused(snapshot, decision, job, options, mine[options.goodput[mine] > held * _FASTER])


def _no_better(decision: Decision, job: Job, options: Options, held: float) -> str:
    """Why no configuration is better than what the job holds."""
    kinds = [kind for kind in options.hardware.types if not job.gpu_types or kind in job.gpu_types]
    if _most_goodput(job, kinds, options) <= held * _FASTER:
        return "its own scaling: no number of GPUs that it may have would make it more than 1 % faster"
    if np.any(options.present.pinned):
        return "the jobs that keep what they hold: no configuration in the rest would make it faster"
    return (
        f"the configurations of {decision.policy}, powers of two on a node and whole nodes: none up to its "
        f"limit of {job_limit(job)} GPUs would make it faster"
    )


def _most_goodput(job: Job, kinds: Sequence[str], options: Options) -> float:
    """Of any number of GPUs that the job's bounds and the cluster's size allow, packed."""
    counts = np.arange(job.min_gpus, min(job_limit(job), options.hardware.total) + 1)
    spans = -(-counts // max(int(options.hardware.width.max(initial=1)), 1))
    return float(np.max(best_goodputs([job], kinds, spans, counts), initial=0.0))


def _held(snapshot: Snapshot, decision: Decision, job: Job, options: Options, row: int) -> float:
    """Goodput of what the job was given; 0 without GPUs, or where it is not known."""
    answer = decision.jobs[job.job_id]
    if answer.goodput is not None:
        return answer.goodput
    shapes = _alternatives(snapshot, decision, options, row)
    return _worth(answer.placement, (each for each in shapes if each.decided)) or 0.0


def _left_unused(snapshot: Snapshot, decision: Decision, job: Job, options: Options, better: Ints) -> str:
    """Why the job was given none of the configurations that are ``better`` although there are free GPUs."""
    others = [answer.placement for name, answer in decision.jobs.items() if name != job.job_id]
    free = {node.name: node.gpus - sum(each.get(node.name, 0) for each in others) for node in snapshot.nodes}
    fitting = [int(option) for option in better if _fits(snapshot, options, free, int(option))]
    if not fitting:
        spare = sum(free.values()) - sum(decision.jobs[job.job_id].placement.values())
        return (
            f"where the free GPUs are: no configuration that would make it faster fits into the {spare} that "
            "are left"
        )
    quota = snapshot.quotas.get(job.team)
    if quota is not None and decision.policy in HEED_CLAIMS:
        team = {each.job_id for each in snapshot.jobs if each.team == job.team} - {job.job_id}
        used = sum(sum(decision.jobs[name].placement.values()) for name in team)
        fitting = [option for option in fitting if used + options.gpus[option] <= quota]
        if not fitting:
            return f"the quota of team {job.team!r}: {quota} GPUs for all of its jobs"
    best = max(fitting, key=lambda option: float(options.goodput[option]))
    shape = f"{in_gpus(int(options.gpus[best]))} on {int(options.nodes[best])} of the nodes"
    answer = decision.jobs[job.job_id]
    if answer.restart_factor is None:
        return f"the rule of {decision.policy}: {shape} would fit, and it does not give them"
    now = answer.goodput_now or _held(snapshot, decision, job, options, int(options.job[best]))
    if job.placement and now and options.goodput[best] * answer.restart_factor <= now * _FASTER:
        faster = float(options.goodput[best]) / now
        return (
            f"what a restart would cost it: {shape} would fit and make it {faster:.2f} x as fast, which "
            f"counts as {faster * answer.restart_factor:.2f} x"
        )
    return f"the search of {decision.policy}: {shape} would fit, but it found nothing better for all jobs"


def _fits(snapshot: Snapshot, options: Options, free: Mapping[str, int], option: int) -> bool:
    """Whether the free GPUs hold the configuration as it is meant: within a node, or on whole ones."""
    kind, width = options.hardware.types[int(options.kind[option])], int(options.width[option])
    gpus, nodes = int(options.gpus[option]), int(options.nodes[option])
    mine = [node for node in snapshot.nodes if node.gpu_type == kind]
    if not width:
        return any(free[node.name] >= gpus for node in mine)
    return sum(free[node.name] == node.gpus == width for node in mine) >= nodes


def _impossible(job: Job, options: Options) -> str:
    there = options.hardware.types
    kinds = [kind for kind in there if not job.gpu_types or kind in job.gpu_types]
    if not kinds:
        return f"GPU types: it takes {', '.join(job.gpu_types)}, and the cluster has {', '.join(there)}"
    if job.min_gpus <= options.hardware.total and not _most_goodput(job, kinds, options):
        if job.estimates:
            return f"its estimator {job.estimator!r}: it says that no configuration is of any use"
        return (
            f"its batch size: it cannot be split over {job.min_gpus} to {job_limit(job)} GPUs with "
            f"{job.min_local_batch_size} to {job.max_local_batch_size} samples on each"
        )
    return (
        f"its bounds: no configuration of {', '.join(kinds)} has between min_gpus {job.min_gpus} and the "
        f"{job_limit(job)} GPUs that it may have now"
    )
