"""Themis (Mahajan et al., NSDI '20): leases on GPUs go to the jobs that are treated least fairly.

Jobs have a fixed size. When leases end, their GPUs are offered to the fraction 1 - f of jobs of worst
finish-time fairness rho; what they leave is for the others, in the same order.
"""

import numpy as np

from pollux.policy.answer import nothing
from pollux.policy.requests import requests_of, run_in_order
from pollux.snapshot import Decision, Snapshot

FAIRNESS_KNOB = 0.8
"""f: the GPUs that come free are offered to the fraction 1 - f of jobs; the paper's default."""

LEASE_S = 600.0
"""How long a job keeps what it won."""


def decide(snapshot: Snapshot) -> Decision:
    """Jobs with a lease go on; the rest of the GPUs goes to the worst treated."""
    if not snapshot.jobs or not any(node.gpus for node in snapshot.nodes):
        return nothing(snapshot, "themis")
    requests = requests_of(snapshot)
    rho, leases = requests.rho, _leases(snapshot)
    holds = np.array(
        [leases.get(job.job_id, 0.0) > snapshot.now_unix_s for job in snapshot.jobs], dtype=np.bool_
    )
    worst_first = np.argsort(-rho, kind="stable")
    bidders = [int(row) for row in worst_first if not holds[row]]
    invited = max(int(np.ceil((1.0 - FAIRNESS_KNOB) * len(bidders))), 1)
    auction = sorted(bidders[:invited], key=lambda row: (-rho[row] / requests.gpus[row], row))
    order = []
    for row in [*np.flatnonzero(holds).tolist(), *auction, *bidders[invited:]]:
        kinds = np.argsort(-requests.rate[row], kind="stable")
        order += [(row, requests.types[kind]) for kind in kinds if requests.rate[row, kind] > 0]
    decision = run_in_order(
        snapshot,
        order,
        policy="themis",
        objective=float(rho.max()),
        why=lambda row: (
            f"finish-time fairness rho is {rho[row]:.2f}" + (", and its lease lasts" * bool(holds[row]))
        ),
        state={},
    )
    kept = {
        job_id: leases[job_id]
        if leases.get(job_id, 0.0) > snapshot.now_unix_s
        else snapshot.now_unix_s + LEASE_S
        for job_id, answer in decision.jobs.items()
        if answer.placement
    }
    return Decision(
        decision=decision.decision,
        policy=decision.policy,
        objective=decision.objective,
        jobs=decision.jobs,
        state={"leases": kept},
    )


def _leases(snapshot: Snapshot) -> dict[str, float]:
    """When the lease of each job that still holds GPUs ends, in Unix seconds."""
    told = snapshot.state.get("leases")
    if not isinstance(told, dict):
        return {}
    running = {job.job_id for job in snapshot.jobs if job.placement}
    return {
        job_id: float(ends)
        for job_id, ends in told.items()
        if job_id in running and isinstance(ends, int | float) and abs(ends) < 1e15
    }
