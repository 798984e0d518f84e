"""Gavel (Narayanan et al., OSDI '20): shares of time on each GPU type from a linear program, then rounds.

Jobs have a fixed size. X[m, j] is the share of time that job m spends on type j; a round serves first the
pairs that have had least of their share. Two of its policies: most total throughput, each job's relative to
its fastest type, so that models can be added up; and the least finish-time fairness rho of the worst job.
"""

from collections.abc import Callable, Mapping

import numpy as np
from scipy.optimize import linprog

from pollux.policy.answer import nothing
from pollux.policy.requests import Requests, requests_of, run_in_order
from pollux.policy.tables import Bools, Floats
from pollux.snapshot import Decision, Snapshot

_BISECTIONS = 20
_LEAST_SHARE = 1e-3


def decide_throughput(snapshot: Snapshot) -> Decision:
    """The round under most total throughput."""
    return _decide(snapshot, "gavel", _most_throughput)


def decide_fairness(snapshot: Snapshot) -> Decision:
    """The round under least finish-time fairness of the worst job."""
    return _decide(snapshot, "gavel-fairness", _least_rho)


def _decide(snapshot: Snapshot, name: str, policy: Callable[[Requests], Floats]) -> Decision:
    if not snapshot.jobs or not any(node.gpus for node in snapshot.nodes):
        return nothing(snapshot, name)
    requests = requests_of(snapshot)
    shares = policy(requests)
    received = _received(snapshot, requests)
    total = np.maximum(received.sum(axis=1, keepdims=True), 1.0)
    priority = np.where(shares > _LEAST_SHARE, shares / (received / total + 0.5 / total), 0.0)
    priority = np.where(
        requests.rate > 0, priority + 1e-6 * requests.rate / requests.best_rate[:, None], -1.0
    )
    rows, kinds = np.unravel_index(np.argsort(-priority, axis=None, kind="stable"), priority.shape)
    order = [
        (int(row), requests.types[kind])
        for row, kind in zip(rows, kinds, strict=True)
        if priority[row, kind] >= 0
    ]
    return run_in_order(
        snapshot,
        order,
        policy=name,
        objective=float((shares * requests.rate / requests.best_rate[:, None]).sum()),
        why=lambda row: f"its best share of time is {float(shares[row].sum()):.2f}",
        state={"received": _count(snapshot, requests, received)},
    )


def _most_throughput(requests: Requests) -> Floats:
    """X (J, T) of most sum of throughput(m, X) / throughput on m's fastest type; Gavel section 4.1."""
    value = requests.rate / requests.best_rate[:, None]
    solved = linprog(-value.ravel(), *_capacities(requests), bounds=(0, 1), method="highs")
    return _shares(requests, solved.x)


def _least_rho(requests: Requests) -> Floats:
    """X (J, T) of least max over m of rho(m, X), by bisection; Gavel section 4.1, finish-time fairness.

    rho = (age + remaining / throughput(X)) / (served + remaining / throughput(equal shares)).
    """
    jobs = len(requests.gpus)
    equal = np.minimum(requests.capacity / (np.maximum(requests.gpus, 1)[:, None] * jobs), 1.0)
    rate_equal = np.maximum((requests.rate * equal).sum(axis=1) / max(len(requests.types), 1), 1e-9)
    alone = np.maximum(requests.served_s + requests.remaining / rate_equal, 1.0)
    matrix, limit = _capacities(requests)
    low, high = 0.0, 1e4
    best = _most_throughput(requests)
    for _ in range(_BISECTIONS):
        rho = np.sqrt(max(low, 1e-3) * high)
        seconds = np.maximum(rho * alone - requests.age_s, 1e-3)
        need = np.minimum(requests.remaining / seconds, requests.best_rate * 0.999)
        late = np.any(requests.remaining / seconds > requests.best_rate)
        solved = linprog(
            -(requests.rate / requests.best_rate[:, None]).ravel(),
            np.vstack([matrix, _per_job(requests, -requests.rate)]),
            np.concatenate([limit, -need]),
            bounds=(0, 1),
            method="highs",
        )
        if solved.success and not (late and rho < 1e3):
            best, high = _shares(requests, solved.x), rho
        else:
            low = rho
    return best


def _capacities(requests: Requests) -> tuple[Floats, Floats]:
    """Rows of: each job's shares add up to one at most, each type's GPUs to its capacity."""
    kinds = len(requests.types)
    per_type = np.zeros((kinds, len(requests.gpus) * kinds))
    for kind in range(kinds):
        per_type[kind, kind::kinds] = requests.gpus
    matrix = np.vstack([_per_job(requests, np.ones_like(requests.rate)), per_type])
    return matrix, np.concatenate([np.ones(len(requests.gpus)), requests.capacity.astype(np.float64)])


def _per_job(requests: Requests, values: Floats) -> Floats:
    jobs, kinds = values.shape
    rows = np.zeros((jobs, jobs * kinds))
    for row in range(jobs):
        rows[row, row * kinds : (row + 1) * kinds] = values[row]
    return rows


def _shares(requests: Requests, x: Floats | None) -> Floats:
    usable: Bools = requests.rate > 0
    if x is None:
        return np.where(usable, 1.0, 0.0)
    return np.where(usable, np.clip(np.reshape(x, requests.rate.shape), 0.0, 1.0), 0.0)


def _received(snapshot: Snapshot, requests: Requests) -> Floats:
    """Rounds that each job had on each type, from the state; what makes no sense there counts as none."""
    told = snapshot.state.get("received")
    remembered = told if isinstance(told, Mapping) else {}
    received = np.zeros(requests.rate.shape)
    for row, job in enumerate(snapshot.jobs):
        counts = remembered.get(job.job_id)
        if isinstance(counts, Mapping):
            for kind, name in enumerate(requests.types):
                rounds = counts.get(name)
                if isinstance(rounds, int) and not isinstance(rounds, bool) and 0 <= rounds < 2**31:
                    received[row, kind] = rounds
    return received


def _count(snapshot: Snapshot, requests: Requests, received: Floats) -> dict[str, dict[str, int]]:
    """The state to keep: what was received, and the present round of the jobs that hold GPUs."""
    kind_of = {node.name: node.gpu_type for node in snapshot.nodes}
    counts = {}
    for row, job in enumerate(snapshot.jobs):
        held = {kind_of[name] for name in job.placement if name in kind_of}
        counts[job.job_id] = {
            kind: int(received[row, index]) + (kind in held) for index, kind in enumerate(requests.types)
        }
    return counts
