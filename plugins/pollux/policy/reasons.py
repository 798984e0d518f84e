"""Why a job gets what it gets, in words that its owner understands, with the numbers behind it."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pollux.policy.models import accepts, is_fitted, job_limit
from pollux.policy.problem import Ints, Problem
from pollux.snapshot import Job, Snapshot

_UNFITTED = "not fitted yet, so it counts as scaling perfectly"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The sentence, and whether the job's goodput is in samples per second."""

    text: str
    fitted: bool


def explain(snapshot: Snapshot, problem: Problem, best: Ints) -> list[Reason]:
    """A reason for each job of the snapshot; ``best`` is the decision's matrix (jobs, nodes)."""
    before, after = problem.present.sum(axis=1), best.sum(axis=1)
    speedup_now, speedup = problem.goodputs(np.stack([problem.present, best])) / problem.fair
    gainers = [job for row, job in enumerate(snapshot.jobs) if after[row] > before[row]]
    reasons = []
    for row, job in enumerate(snapshot.jobs):
        fitted = is_fitted(job)
        moved = bool(np.any(best[row] != problem.present[row]))
        parts = [_headline(job, snapshot, int(before[row]), int(after[row]), moved=moved)]
        if before[row] or after[row]:
            parts.append(
                f"speed-up against the fair share ({_gpus(problem.fair_gpus)}) "
                + (f"{speedup_now[row]:.2f} -> {speedup[row]:.2f}" if moved else f"{speedup[row]:.2f}")
            )
        if moved and before[row]:
            parts.append(f"a restart is priced at factor {problem.factor[row]:.2f}")
        if after[row] < before[row]:
            parts.append(_beneficiaries(gainers))
        if problem.pinned[row]:
            parts.append("it may not be preempted, so it keeps what it holds")
        elif 0 < after[row] == job_limit(job) < job.max_gpus:
            parts.append(_limit(job, int(after[row])))
        if not fitted:
            known = any("not fitted yet" in remark for remark in job.remarks)
            parts.append("it counts as scaling perfectly" if known else _UNFITTED)
        parts.extend(job.remarks)
        reasons.append(Reason(text="; ".join(part for part in parts if part), fitted=fitted))
    return reasons


def _headline(job: Job, snapshot: Snapshot, before: int, after: int, *, moved: bool) -> str:
    lost = job.num_gpus if before == 0 else 0
    if lost and after:
        return f"moved {lost} -> {after}: the GPUs that it was given are no longer there"
    if not before and not after:
        return _waits(job, snapshot)
    if not before:
        return f"started on {_gpus(after)}"
    if not after:
        return f"stopped, {before} -> 0: its GPUs do more for the other jobs"
    if after > before:
        return f"grown {before} -> {after}"
    if after < before:
        return f"shrunk {before} -> {after}"
    return f"moved: {_gpus(after)} elsewhere" if moved else f"keeps {_gpus(after)}"


def _waits(job: Job, snapshot: Snapshot) -> str:
    by_type: Counter[str] = Counter()
    for node in snapshot.nodes:
        by_type[node.gpu_type] += node.gpus if accepts(job, node) else 0
    usable = max(by_type.values(), default=0)
    total = sum(node.gpus for node in snapshot.nodes)
    if not usable:
        return f"waits: no node has a GPU of a type that it accepts ({', '.join(job.gpu_types)})"
    if usable < job.min_gpus:
        return f"waits: it needs {_gpus(job.min_gpus)} of one type at once, and there are {usable} at most"
    return f"waits: the cluster's {_gpus(total)} do more for the other jobs now; it is {job.age_s:.0f} s old"


def _limit(job: Job, gpus: int) -> str:
    if not job.max_gpus_seen:
        return f"{_gpus(gpus)} is its limit until it has run"
    return f"{_gpus(gpus)} is its limit now, twice the most it has run on" if gpus > job.min_gpus else ""


def _beneficiaries(gainers: list[Job]) -> str:
    if not gainers:
        return ""
    names = [job.name or job.job_id for job in gainers[:3]]
    rest = f" and {len(gainers) - 3} more" if len(gainers) > 3 else ""
    return f"makes room for {', '.join(names)}{rest}"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
