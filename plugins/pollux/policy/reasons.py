"""Why a job gets what it gets, in words that its owner understands, with the numbers behind it."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pollux.policy.models import accepts, job_limit
from pollux.policy.options import is_reserved
from pollux.policy.problem import Bools, Floats, Ints, Problem
from pollux.policy.tables import models_of
from pollux.snapshot import Job, Snapshot

_UNFITTED = "not fitted yet, so it counts as scaling perfectly"
_AT_M0 = "its noise scale is not known yet, so it counts as training at its initial batch size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The sentence, and whether the job's goodput is in samples per second."""

    text: str
    fitted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the sentences tell; arrays (J), and ``gains`` (J), by node how many GPUs more a job gets there.

    GPUs ``before`` and ``after``, whether the placement ``moved``, ``speedup_now`` and ``speedup`` against
    the fair share of ``fair_gpus``, the ``factor`` that a change costs, which jobs are ``pinned``, which
    are ``fitted``, and which of the others count as training ``at_m0``.
    """

    before: Ints
    after: Ints
    moved: Bools
    speedup_now: Floats
    speedup: Floats
    factor: Floats
    pinned: Bools
    fitted: Bools
    at_m0: Bools
    gains: Sequence[Mapping[Hashable, int]]
    fair_gpus: int


def explain(snapshot: Snapshot, problem: Problem, best: Ints) -> list[Reason]:
    """A reason for each job of the snapshot; ``best`` is the decision's matrix (jobs, nodes)."""
    speedup_now, speedup = problem.goodputs(np.stack([problem.present, best])) / problem.fair
    known = models_of(snapshot.jobs, ("",)).known
    change = best - problem.present
    return explain_facts(
        snapshot,
        Facts(
            before=problem.present.sum(axis=1),
            after=best.sum(axis=1),
            moved=np.any(best != problem.present, axis=1),
            speedup_now=speedup_now,
            speedup=speedup,
            factor=problem.factor,
            pinned=problem.pinned,
            fitted=known,
            at_m0=np.zeros_like(known),
            gains=[{int(node): int(each[node]) for node in np.flatnonzero(each)} for each in change],
            fair_gpus=problem.fair_gpus,
        ),
    )


def explain_facts(snapshot: Snapshot, facts: Facts) -> list[Reason]:
    """A reason for each job of the snapshot."""
    takers: dict[Hashable, list[int]] = defaultdict(list)
    for row, gains in enumerate(facts.gains):
        if sum(gains.values()) > 0:
            for node, gpus in gains.items():
                if gpus > 0:
                    takers[node].append(row)
    return [_reason(snapshot, facts, row, takers) for row in range(len(snapshot.jobs))]


def _reason(snapshot: Snapshot, facts: Facts, row: int, takers: Mapping[Hashable, Sequence[int]]) -> Reason:
    job, moved = snapshot.jobs[row], bool(facts.moved[row])
    before, after = int(facts.before[row]), int(facts.after[row])
    now, then = facts.speedup_now[row], facts.speedup[row]
    fitted = bool(facts.fitted[row])
    parts = [_headline(job, snapshot, before, after, moved=moved)]
    if before or after:
        parts.append(
            f"speed-up against the fair share ({in_gpus(facts.fair_gpus)}) "
            + (f"{now:.2f} -> {then:.2f}" if moved else f"{then:.2f}")
        )
    if moved and before:
        parts.append(f"for the restart, the change counts at {facts.factor[row]:.2f} of its worth")
    if after < before:
        left = [node for node, gpus in facts.gains[row].items() if gpus < 0]
        heirs = sorted({heir for node in left for heir in takers.get(node, ())})
        parts.append(_beneficiaries([snapshot.jobs[heir] for heir in heirs]))
    if facts.pinned[row]:
        parts.append(_pin(job, snapshot.now_unix_s))
    elif 0 < after == job_limit(job) < job.max_gpus:
        parts.append(_limit(job, after))
    if facts.at_m0[row]:
        parts.append(_AT_M0)
    elif not fitted:
        known = any("not fitted yet" in remark for remark in job.remarks)
        parts.append("it counts as scaling perfectly" if known else _UNFITTED)
    parts.extend(job.remarks)
    return Reason(text="; ".join(part for part in parts if part), fitted=fitted)


def _pin(job: Job, now_unix_s: float) -> str:
    """What keeps a pinned job where it is."""
    if not job.preemptible:
        return "it may not be preempted, so it keeps what it holds"
    if is_reserved(job, now_unix_s) and job.num_gpus >= job.min_gpus:
        return "its reservation lasts, so it keeps what it holds"
    return "it is restarting, and is left alone until it trains"


def _headline(job: Job, snapshot: Snapshot, before: int, after: int, *, moved: bool) -> str:
    lost = job.num_gpus if before == 0 else 0
    if lost and after:
        return f"moved {lost} -> {after}: the GPUs that it was given are no longer there"
    if not before and not after:
        return _waits(job, snapshot)
    if not before:
        return f"started on {in_gpus(after)}"
    if not after:
        return f"stopped, {before} -> 0: its GPUs do more for the other jobs"
    if after > before:
        return f"grown {before} -> {after}"
    if after < before:
        return f"shrunk {before} -> {after}"
    return f"moved: {in_gpus(after)} elsewhere" if moved else f"keeps {in_gpus(after)}"


def _waits(job: Job, snapshot: Snapshot) -> str:
    by_type: Counter[str] = Counter()
    for node in snapshot.nodes:
        by_type[node.gpu_type] += node.gpus if accepts(job, node) else 0
    usable = max(by_type.values(), default=0)
    total = sum(node.gpus for node in snapshot.nodes)
    if not usable:
        return f"waits: no node has a GPU of a type that it accepts ({', '.join(job.gpu_types)})"
    if usable < job.min_gpus:
        return f"waits: it needs {in_gpus(job.min_gpus)} of one type at once, and there are {usable} at most"
    return (
        f"waits: the cluster's {in_gpus(total)} do more for the other jobs now; it is {job.age_s:.0f} s old"
    )


def _limit(job: Job, gpus: int) -> str:
    if not job.max_gpus_seen:
        return f"{in_gpus(gpus)} is its limit until it has run"
    return f"{in_gpus(gpus)} is its limit now, twice the most that was seen" if gpus > job.min_gpus else ""


def _beneficiaries(heirs: Sequence[Job]) -> str:
    """The jobs that grow where this one gives up GPUs."""
    names = [job.name or job.job_id for job in heirs]
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"makes room for {', '.join(names[:3])}{rest}" if names else ""


def in_gpus(count: int) -> str:
    """A number of GPUs in words."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
