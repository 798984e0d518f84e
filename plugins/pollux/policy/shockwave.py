"""Shockwave (Zheng et al., NSDI '23): plan a window of rounds for social welfare over time, and the makespan.

Jobs have a fixed size. In a window of R rounds job i gets y_i of them; the plan maximises

    sum_i rho_i^k log((served_i + y_i T) / (served_i + remaining_i))  -  weight H / mean remaining time

where rho is the expected finish-time fairness, T a round's seconds, and H the longest time that any job still
needs after the window. The logarithm is the least of a few tangents, so that it is an integer program. Rounds
then run the jobs that have most of their y_i left. Its forecast of batch sizes that change is not needed: a
job's remaining work is declared.
"""

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array

from pollux.policy.answer import nothing
from pollux.policy.requests import Requests, requests_of, run_in_order
from pollux.policy.tables import Floats
from pollux.snapshot import Decision, Snapshot

WINDOW = 20
"""Rounds that are planned ahead."""

POWER = 5.0
"""k: how much more a job that is treated unfairly counts."""

MAKESPAN_WEIGHT = 0.1
_TANGENTS = 6
_GAP, _NODES = 1e-3, 500


def decide(snapshot: Snapshot) -> Decision:
    """The first round of a new plan."""
    if not snapshot.jobs or not any(node.gpus for node in snapshot.nodes):
        return nothing(snapshot, "shockwave")
    requests = requests_of(snapshot)
    rounds = _plan(requests, max(snapshot.interval_s, 1.0))
    runs = np.array([bool(job.placement) for job in snapshot.jobs])
    rho = requests.rho
    rows = np.lexsort((np.arange(len(rounds)), -rho, ~runs, -np.round(rounds)))
    order = []
    for row in rows.tolist():
        kinds = np.argsort(-requests.rate[row], kind="stable")
        order += [(row, requests.types[kind]) for kind in kinds if requests.rate[row, kind] > 0]
    return run_in_order(
        snapshot,
        order,
        policy="shockwave",
        objective=float(rounds.sum()),
        why=lambda row: f"{rounds[row]:.0f} of the next {WINDOW} rounds are its own, rho is {rho[row]:.2f}",
        state={},
    )


def _plan(requests: Requests, round_s: float) -> Floats:
    """Rounds y (J) of the window for each job."""
    jobs = len(requests.gpus)
    served, remaining = requests.served_s, np.clip(requests.remaining_s, 1.0, 1e9)
    most = np.minimum(np.ceil(remaining / round_s), WINDOW)
    most = np.where(requests.rate.max(axis=1) > 0, most, 0.0)
    weight = np.clip(requests.rho, 0.1, 10.0) ** POWER
    weight /= weight.max()
    usual = float(remaining.mean())
    # variables: y (J), u (J) the utilities, H
    points = np.linspace(0.0, 1.0, _TANGENTS)[None, :] * most[:, None]
    share = (served[:, None] + points * round_s + 1.0) / (served + remaining + 1.0)[:, None]
    slope = (round_s / (served + remaining + 1.0))[:, None] / share
    row, tangent = np.divmod(np.arange(jobs * _TANGENTS), _TANGENTS)
    number = np.arange(jobs * _TANGENTS)
    below = coo_array(
        (
            np.concatenate([np.ones(len(number)), -slope.ravel()]),
            (np.concatenate([number, number]), np.concatenate([jobs + row, row])),
        ),
        shape=(len(number), 2 * jobs + 1),
    )
    upper = (np.log(share) - slope * points)[row, tangent]
    capacity = np.concatenate([requests.gpus, np.zeros(jobs + 1)])[None, :]
    everyone = np.arange(jobs)
    makespan = coo_array(
        (
            np.concatenate([np.full(jobs, round_s), np.ones(jobs)]),
            (np.concatenate([everyone, everyone]), np.concatenate([everyone, np.full(jobs, 2 * jobs)])),
        ),
        shape=(jobs, 2 * jobs + 1),
    )
    solved = milp(
        np.concatenate([np.zeros(jobs), -weight, [MAKESPAN_WEIGHT / usual]]),
        integrality=np.concatenate([np.ones(jobs), np.zeros(jobs + 1)]),
        bounds=(
            np.concatenate([np.zeros(jobs), np.full(jobs, -np.inf), [0.0]]),
            np.concatenate([most, np.full(jobs + 1, np.inf)]),
        ),
        constraints=[
            LinearConstraint(below.tocsc(), -np.inf, upper),
            LinearConstraint(capacity, -np.inf, float(requests.capacity.sum() * WINDOW)),
            LinearConstraint(makespan.tocsc(), np.where(most > 0, np.minimum(remaining, 1e7), 0.0), np.inf),
        ],
        options={"mip_rel_gap": _GAP, "node_limit": _NODES},
    )
    return most if solved.x is None else np.asarray(solved.x[:jobs], dtype=np.float64)
