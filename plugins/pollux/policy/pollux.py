"""The Pollux policy: the allocation of highest goodput fitness (OSDI '21, section 4.2). Pure and seeded.

On several types of GPU the search takes larger nodes for several virtual ones, all equal, and a row over two
types becomes one of the type with most of its GPUs, a tie one of the faster: so Sia (section 4.3) ran Pollux,
whose published search knows one size of node only. The figures of a decision are those of the real nodes.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from pollux.policy.problem import Ints, Problem, all_matrices, formulate
from pollux.policy.reasons import explain
from pollux.policy.search import search
from pollux.policy.virtual import cut
from pollux.snapshot import Decision, JobDecision, Snapshot

_EXHAUSTIVE = 4000
"""Where there are no more matrices than this all of them are tried, and nothing is left to chance."""

_STATE_CHARS = 30_000


def decide(snapshot: Snapshot) -> Decision:
    """The best allocation found for the snapshot's jobs; the same snapshot gives the same decision."""
    if not snapshot.jobs or not any(node.gpus for node in snapshot.nodes):
        return _nothing(snapshot)
    problem = formulate(snapshot)
    searched = cut(problem)
    everything = all_matrices(searched, _EXHAUSTIVE)
    if everything is not None:
        order, _ = searched.rank(everything)
        population, state = everything[order[:1]], {}
    else:
        settings = snapshot.policy
        population = search(
            searched,
            _recall(snapshot),
            size=settings.population,
            generations=settings.generations,
            rng=np.random.default_rng((settings.seed, snapshot.decision)),
        )
        state = _remember(snapshot, population)
    best = population[0]
    _, fitness = problem.rank(best[None])
    return Decision(
        decision=snapshot.decision,
        policy="pollux",
        objective=_figure(fitness[0]),
        jobs=_job_decisions(snapshot, problem, best),
        state=state,
    )


def _nothing(snapshot: Snapshot) -> Decision:
    reason = "waits: the cluster has no GPU to give"
    return Decision(
        decision=snapshot.decision,
        policy="pollux",
        objective=0.0,
        jobs={job.job_id: JobDecision(reason=reason) for job in snapshot.jobs},
    )


def _job_decisions(snapshot: Snapshot, problem: Problem, best: Ints) -> dict[str, JobDecision]:
    placements = [
        {node.name: int(gpus) for node, gpus in zip(snapshot.nodes, row, strict=True) if gpus} for row in best
    ]
    goodput, now = problem.goodputs(np.stack([best, problem.present]))
    reasons = explain(snapshot, problem, best)
    decisions = {}
    for row, job in enumerate(snapshot.jobs):
        decisions[job.job_id] = JobDecision(
            placement=placements[row],
            reason=reasons[row].text,
            goodput=_figure(goodput[row]) if reasons[row].fitted else None,
            goodput_now=_figure(now[row]) if reasons[row].fitted else None,
            speedup=_figure(goodput[row] / problem.fair[row]),
            restart_factor=_figure(problem.factor[row]),
        )
    return decisions


def _figure(value: float) -> float:
    """Nine digits: the last ones depend on the processor's vector instructions, and a decision does not."""
    return float(f"{value:.9g}")


def _remember(snapshot: Snapshot, population: Ints) -> dict[str, Any]:
    """The best candidates, each a list of job, node, GPUs, job, node, GPUs, ...; as many as have room."""
    state: dict[str, Any] = {
        "jobs": [job.job_id for job in snapshot.jobs],
        "nodes": [node.name for node in snapshot.nodes],
    }
    room = _STATE_CHARS - len(json.dumps(state)) - len('"population":[]')
    kept = []
    for candidate in population:
        rows, columns = np.nonzero(candidate)
        flat = np.column_stack([rows, columns, candidate[rows, columns]]).ravel().tolist()
        room -= len(json.dumps(flat)) + 2
        if room < 0:
            break
        kept.append(flat)
    return state | {"population": kept} if kept else {}


def _recall(snapshot: Snapshot) -> list[Ints]:
    """The matrices that the last decision remembered, for the jobs and nodes of today; [] if unreadable."""
    try:
        return list(_matrices(snapshot, snapshot.state))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return []


def _matrices(snapshot: Snapshot, state: Mapping[str, Any]) -> list[Ints]:
    if not state:
        return []
    job_rows = {job.job_id: row for row, job in enumerate(snapshot.jobs)}
    node_columns = {node.name: column for column, node in enumerate(snapshot.nodes)}
    rows = np.array([job_rows.get(name, -1) for name in state["jobs"]], dtype=np.int64)
    columns = np.array([node_columns.get(name, -1) for name in state["nodes"]], dtype=np.int64)
    matrices = []
    for flat in state["population"][: snapshot.policy.population]:
        old_row, old_column, gpus = np.array(flat, dtype=np.int64).reshape(-1, 3).T
        row, column = rows[old_row], columns[old_column]
        known = (row >= 0) & (column >= 0)
        matrix = np.zeros((len(snapshot.jobs), len(snapshot.nodes)), dtype=np.int64)
        matrix[row[known], column[known]] = np.clip(gpus[known], 0, 10**6)
        matrices.append(matrix)
    return matrices
