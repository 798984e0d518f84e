"""The population search for the best allocation matrix; Pollux section 4.2.2."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from pollux.policy.problem import Ints, Problem

_PRESSURE = 3
"""How strongly better candidates are preferred as parents: rank = size u^3, u uniform in [0, 1)."""

_CHANGES = (1.0, 0.4, 0.1)
"""Chance of a first, a second and a third change to a child."""

_GREEDY_JOBS = 16
"""Jobs tried at each step of the greedy start."""

_PATIENCE = 40
"""Generations without a better candidate after which the search ends."""


def search(
    problem: Problem,
    earlier: Sequence[Ints],
    *,
    size: int,
    generations: int,
    rng: Generator,
) -> Ints:
    """The final population, best first; shape (candidates, jobs, nodes), every candidate legal.

    It starts from ``earlier`` matrices (the last decision's population, by and large), today's
    allocation, and greedily built ones.
    """
    population = _select(problem, _first(problem, earlier, rng), size, rng)
    best, age = population[0], 0
    for _ in range(generations):
        children = _mutate(problem, _cross(population, size, rng), rng)
        population = _select(problem, np.concatenate([population, children]), size, rng)
        age = age + 1 if np.array_equal(population[0], best) else 0
        best = population[0]
        if age >= _PATIENCE:
            break
    return population


def _first(problem: Problem, earlier: Sequence[Ints], rng: Generator) -> Ints:
    nothing = np.zeros_like(problem.present)
    start = np.stack([problem.present, nothing, *earlier])
    start = problem.repair(start, rng.random(start.shape[:2]))
    return np.concatenate([start, *(_greedy(problem, candidate, rng) for candidate in start[:2])])


def _greedy(problem: Problem, candidate: Ints, rng: Generator) -> Ints:
    """Grow jobs one at a time, each time the one that raises the fitness most; shape (1, jobs, nodes).

    Tried for some jobs, drawn anew each time, and every type of GPU: one more GPU (or the job's least),
    and twice as many. It ends when a few draws in a row find nothing.
    """
    num_jobs = len(candidate)
    sample = min(num_jobs, _GREEDY_JOBS)
    choice, doubled, kind = (
        axis.ravel() for axis in np.meshgrid(np.arange(sample), [0, 1], np.arange(problem.num_types))
    )
    keep = np.zeros(len(choice), dtype=np.bool_)
    current, misses = candidate, 0
    while misses * sample < 2 * num_jobs:
        jobs = rng.permutation(num_jobs)[:sample][choice] if sample < num_jobs else choice
        held = current.sum(axis=1)[jobs]
        wish = np.maximum(np.where(doubled, 2 * held, held + 1), problem.least[jobs])
        wish = np.minimum(wish, problem.most[jobs])
        grown = problem.place(np.repeat(current[None], len(jobs), axis=0), jobs, wish, kind, evict=keep)
        grown = problem.repair(grown, np.zeros(grown.shape[:2]))
        order, _ = problem.rank(np.concatenate([current[None], grown]))
        if order[0] == 0:
            misses += 1
        else:
            current, misses = grown[order[0] - 1], 0
    return np.asarray(current[None])


def _cross(population: Ints, size: int, rng: Generator) -> Ints:
    """Children that take each job's row from either of two parents, half of them from one parent alone.

    Parents come from a population sorted best first, the better ones more often.
    """
    fathers, mothers = (len(population) * rng.random((2, size)) ** _PRESSURE).astype(np.int64)
    from_mother = rng.random((size, population.shape[1], 1)) < 0.5
    from_mother[: size // 2] = False
    return np.asarray(np.where(from_mother, population[mothers], population[fathers]))


def _mutate(problem: Problem, children: Ints, rng: Generator) -> Ints:
    """Change each child in one or a few places, then repair it.

    The changes: a job gets another number of GPUs, from what is free or by eviction; one GPU goes from
    one job to another; two jobs swap rows; a job goes back to today's row; an entry becomes any number.
    """
    size, jobs, nodes = children.shape
    priority = rng.random((size, jobs))
    for turn in range(len(_CHANGES)):
        where = np.flatnonzero(rng.random(size) < _CHANGES[turn])
        if not len(where):
            continue
        some = children[where]
        rows = np.arange(len(where))
        job, other = rng.integers(jobs, size=(2, len(where)))
        node = rng.integers(nodes, size=len(where))
        move = rng.random(len(where))

        evict = rng.random(len(where)) < 0.5
        gpus = rng.integers(0, problem.most[job] + 1)
        held = some[rows, job].sum(axis=1)
        near = np.clip(held + rng.integers(-2, 3, size=len(where)), 0, problem.most[job])
        gpus = np.where(rng.random(len(where)) < 0.5, gpus, near)
        kind = rng.integers(problem.num_types, size=len(where))
        placed = problem.place(some, job, gpus, kind, evict=evict)
        priority[where, job] = np.where(evict, 2.0 + turn, priority[where, job])

        changed = np.where((move < 0.6)[:, None, None], placed, some)
        _hand_over(changed, rows[(move >= 0.6) & (move < 0.75)], job, other, node)
        _swap(changed, rows[(move >= 0.75) & (move < 0.85)], job, other)
        back = rows[(move >= 0.85) & (move < 0.93)]
        changed[back, job[back]] = problem.present[job[back]]
        entry = rows[move >= 0.93]
        changed[entry, job[entry], node[entry]] = rng.integers(0, problem.capacity[node[entry]] + 1)
        children[where] = changed
    return problem.repair(children, priority)


def _hand_over(population: Ints, rows: Ints, job: Ints, other: Ints, node: Ints) -> None:
    """In the candidates ``rows``, one GPU of ``node`` goes from ``job`` to ``other``."""
    job, other, node = job[rows], other[rows], node[rows]
    gives = ((population[rows, job, node] > 0) & (job != other)).astype(np.int64)
    population[rows, job, node] -= gives
    population[rows, other, node] += gives


def _swap(population: Ints, rows: Ints, job: Ints, other: Ints) -> None:
    """In the candidates ``rows``, ``job`` and ``other`` take each other's GPUs."""
    job, other = job[rows], other[rows]
    mine, theirs = population[rows, job], population[rows, other]
    population[rows, job], population[rows, other] = theirs, mine


def _select(problem: Problem, population: Ints, size: int, rng: Generator) -> Ints:
    """The ``size`` best different candidates, best first."""
    weights = rng.integers(1, 2**62, size=population.shape[1] * population.shape[2])
    marks = population.reshape(len(population), -1) @ weights
    different = population[np.sort(np.unique(marks, return_index=True)[1])]
    order, _ = problem.rank(different)
    return np.asarray(different[order[:size]])
