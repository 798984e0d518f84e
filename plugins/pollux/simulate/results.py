"""What simulations gave, as the documents results.json and timings.json."""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from pollux.simulate.engine import Outcome
from pollux.simulate.fairness import fairness
from pollux.simulate.job import SimulatedJob
from pollux.simulate.setup import ClusterSetup

MEANS = ("avg_jct_s", "p99_jct_s", "makespan_s", "restarts_per_job", "gpu_hours_per_job")


def summary(outcome: Outcome, cluster: ClusterSetup, *, interval_s: float = 60.0) -> dict[str, Any]:
    """One workload's entry in results.json: the same simulation gives the same figures.

    ``timeline`` holds a column for each figure, with a value for each round that had jobs. Jobs that never
    finish are listed and marked, counted in ``unfinished``, and left out of times and of ``ftf``; restarts
    and GPU hours are those of all.
    """
    jobs = outcome.jobs
    ended = [(job, job.completed_s) for job in jobs if job.completed_s is not None]
    times = [end_s - job.request.submitted_s for job, end_s in ended]
    rho = fairness(jobs, cluster, interval_s=interval_s)
    return {
        "name": outcome.workload.name,
        "set": outcome.workload.set,
        "avg_jct_s": _figure(fmean(times)) if times else None,
        "p99_jct_s": _figure(float(np.percentile(times, 99))) if times else None,
        "makespan_s": _figure(max(end_s for _, end_s in ended)) if ended else None,
        "restarts_per_job": _figure(fmean(job.restarts for job in jobs)),
        "gpu_hours_per_job": _figure(fmean(job.attained_gpu_s for job in jobs) / 3600),
        "restart_share": _figure(_share_of_restarts(jobs)),
        "unfinished": len(jobs) - len(ended),
        "ftf": {
            "max": _figure(max(rho.values())) if rho else None,
            "unfair_fraction": _figure(fmean(value > 1 for value in rho.values())) if rho else None,
        },
        "jobs": [_job(job, rho.get(job.request.name)) for job in jobs],
        "timeline": {
            "time_s": [_figure(entry.time_s) for entry in outcome.rounds],
            "gpus": [entry.gpus for entry in outcome.rounds],
            "running": [entry.running for entry in outcome.rounds],
            "waiting": [entry.waiting for entry in outcome.rounds],
            "efficiency": [round(entry.efficiency, 4) for entry in outcome.rounds],
        },
    }


def mean(workloads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each figure over the workloads that have it, and how many jobs of all never finished."""
    means: dict[str, Any] = {"unfinished": sum(workload["unfinished"] for workload in workloads)}
    for key in MEANS:
        values = [workload[key] for workload in workloads if workload[key] is not None]
        means[key] = _figure(fmean(values)) if values else None
    for key in ("max", "unfair_fraction"):
        values = [workload["ftf"][key] for workload in workloads if workload["ftf"][key] is not None]
        means.setdefault("ftf", {})[key] = _figure(fmean(values)) if values else None
    return means


def timing(outcome: Outcome) -> dict[str, Any]:
    """One workload's entry in timings.json: wall-clock seconds, which no two runs share.

    ``timed_out`` counts the decisions that a solver's wall-clock limit ended.
    """
    decide_s = outcome.decide_s or [0.0]
    return {
        "name": outcome.workload.name,
        "set": outcome.workload.set,
        "wall_s": round(outcome.wall_s, 3),
        "cpu_s": round(outcome.cpu_s, 3),
        "decisions": len(outcome.decide_s),
        "timed_out": outcome.timed_out,
        "decide_s": {
            "total": round(sum(decide_s), 3),
            "median": round(median(decide_s), 6),
            "max": round(max(decide_s), 6),
        },
    }


def _job(job: SimulatedJob, rho: float | None) -> dict[str, Any]:
    return {
        "name": job.request.name,
        "application": job.app.name,
        "submitted_s": _figure(job.request.submitted_s),
        "started_s": None if job.started_s is None else _figure(job.started_s),
        "completed_s": None if job.completed_s is None else _figure(job.completed_s),
        "finished": job.completed_s is not None,
        "restarts": job.restarts,
        "gpu_s": _figure(job.attained_gpu_s),
        "rho": None if rho is None else _figure(rho),
    }


def _share_of_restarts(jobs: Sequence[SimulatedJob]) -> float:
    total = sum(job.attained_gpu_s for job in jobs)
    return sum(job.restarting_gpu_s for job in jobs) / total if total else 0.0


def _figure(value: float) -> float:
    """Nine digits, so that the last bits of a processor's arithmetic do not show."""
    return float(f"{float(value):.9g}")
