"""The population search for the best allocation matrix; Pollux section 4.2.2."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from pollux.policy.breeding import Breeder
from pollux.policy.climbing import climb
from pollux.policy.problem import Floats, Ints, Problem

_GREEDY_JOBS = 16
"""Jobs tried at each step of the greedy start."""

_PATIENCE, _PATIENCE_PER_JOB, _MOST_PATIENCE = 8, 1, 40
"""Generations without a better candidate after which the search ends: some, more with more jobs."""


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
    allocation, what a climb from there reaches, and greedily built ones; another climb ends it.
    """
    breeder = Breeder(problem, rng)
    herd = _Herd.of(breeder, _first(problem, earlier, rng).astype(np.float64)).best(size)
    patience = min(_PATIENCE + _PATIENCE_PER_JOB * problem.shape[0], _MOST_PATIENCE)
    leader, age = herd.marks[0], 0
    for _ in range(generations):
        children = _Herd.of(breeder, breeder.children(herd.matrices, size))
        herd = herd.best(size, children)
        age = age + 1 if herd.marks[0] == leader else 0
        leader = herd.marks[0]
        if age >= patience:
            break
    final = np.rint(herd.matrices).astype(np.int64)
    final = final[problem.rank(final)[0]]
    best = climb(problem, final[0], rng)
    return np.concatenate([best[None], final[1:] if np.array_equal(best, final[0]) else final])[:size]


@dataclass(frozen=True, slots=True)
class _Herd:
    """Candidates with their sort keys and marks, as :meth:`Breeder.judge` gives them."""

    matrices: Floats
    keys: Floats
    marks: Ints

    @classmethod
    def of(cls, breeder: Breeder, matrices: Floats) -> "_Herd":
        return cls(matrices, *breeder.judge(matrices))

    def best(self, size: int, more: "_Herd | None" = None) -> "_Herd":
        """The ``size`` best different candidates, of this herd and ``more``, best first.

        Equal ones have equal keys, so they are neighbours.
        """
        keys, marks = self.keys, self.marks
        if more is not None:
            keys, marks = np.concatenate([keys, more.keys], axis=1), np.concatenate([marks, more.marks])
        order = np.lexsort(keys)
        sorted_marks = marks[order]
        order = order[np.concatenate([[True], sorted_marks[1:] != sorted_marks[:-1]])][:size]
        matrices = self.matrices[order % len(self.matrices)]
        if more is not None:
            new = order >= len(self.matrices)
            matrices[new] = more.matrices[order[new] - len(self.matrices)]
        return _Herd(matrices, keys[:, order], marks[order])


def _first(problem: Problem, earlier: Sequence[Ints], rng: Generator) -> Ints:
    nothing = np.zeros_like(problem.present)
    start = np.stack([problem.present, nothing, *earlier])
    start = problem.repair(start, rng.random(start.shape[:2]))
    greedy = (_greedy(problem, candidate, rng) for candidate in start[:2])
    return np.concatenate([start, *greedy, climb(problem, start[0], rng)[None]])


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
    current, misses = candidate.copy(), 0
    while misses * sample < 2 * num_jobs:
        jobs = rng.permutation(num_jobs)[:sample][choice] if sample < num_jobs else choice
        held = current.sum(axis=1)[jobs]
        wish = np.maximum(np.where(doubled, 2 * held, held + 1), problem.least[jobs])
        wish = np.minimum(wish, problem.most[jobs])
        rows = problem.rows(current, jobs, wish, kind)
        best = problem.best_row(current, jobs, rows)
        if best < 0:
            misses += 1
        else:
            current[jobs[best]], misses = rows[best], 0
    return np.asarray(current[None])
