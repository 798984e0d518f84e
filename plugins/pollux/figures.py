"""The figures of one decision, and what became of the one before; pure."""

from collections.abc import Mapping, Sequence

from pollux.act import ActionOutcome
from pollux.cluster.base import ClusterView
from pollux.snapshot import Decision, Snapshot
from pollux.store import JobRecord

_FAILED = frozenset({"conflict", "refused", "gone", "unavailable"})
_DELAYED = frozenset({"waits", "vacated"})


def decision_figures(
    snapshot: Snapshot,
    decision: Decision,
    outcomes: Sequence[ActionOutcome],
    *,
    left_out: int = 0,
) -> Mapping[str, float]:
    """What is plotted against the decision's number; ``left_out`` jobs took no part in it."""
    given = [sum(job.placement.values()) for job in decision.jobs.values()]
    total = sum(node.gpus for node in snapshot.nodes)
    goodputs = [job.goodput for job in decision.jobs.values() if job.goodput is not None]
    return {
        "decision": float(decision.decision),
        "time_unix_s": snapshot.now_unix_s,
        "interval_s": snapshot.interval_s,
        "objective": decision.objective,
        "gpus": float(total),
        "gpus_allocated": float(sum(given)),
        "gpus_idle": float(total - sum(given)),
        "jobs_running": float(sum(gpus > 0 for gpus in given)),
        "jobs_waiting": float(sum(gpus == 0 for gpus in given)),
        "jobs_left_out": float(left_out),
        "restarts": float(sum(job.restarts for job in snapshot.jobs)),
        "changes": float(len(outcomes)),
        "changes_done": float(sum(outcome.outcome == "done" for outcome in outcomes)),
        "changes_delayed": float(sum(outcome.outcome in _DELAYED for outcome in outcomes)),
        "changes_failed": float(sum(outcome.outcome in _FAILED for outcome in outcomes)),
        "predicted_goodput": sum(goodputs),
    }


def realised_goodput(
    previous: Decision, view: ClusterView, records: Mapping[str, JobRecord]
) -> Mapping[str, tuple[float, float]]:
    """Goodput (predicted, reported) of each job that still runs as the previous decision placed it."""
    pairs = {}
    for job in view.jobs:
        decided = previous.jobs.get(job.job_id)
        record = records.get(job.job_id)
        report = record.report if record else None
        if decided is None or decided.goodput is None or report is None or report.goodput is None:
            continue
        settled = job.status.held == decided.placement == job.allocation.placement
        if settled and report.time_unix_s >= job.status.since_unix_s:
            pairs[job.job_id] = (decided.goodput, report.goodput)
    return pairs


def realised_figures(pairs: Mapping[str, tuple[float, float]]) -> Mapping[str, float]:
    """Sums over the jobs of which both goodputs are known; nothing if there is none."""
    if not pairs:
        return {}
    return {
        "realised_jobs": float(len(pairs)),
        "realised_goodput": sum(reported for _, reported in pairs.values()),
        "realised_goodput_predicted": sum(predicted for predicted, _ in pairs.values()),
    }
