"""The population search for the best allocation matrix; Pollux section 4.2.2."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from pollux.policy.breeding import Breeder
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
    allocation, and greedily built ones.
    """
    breeder = Breeder(problem, rng)
    herd = _Herd.of(breeder, _first(problem, earlier, rng).astype(np.float64)).best(size)
    patience = min(_PATIENCE + _PATIENCE_PER_JOB * problem.shape[0], _MOST_PATIENCE)
    leader, age = herd.marks[0], 0
    for _ in range(generations):
        children = _Herd.of(breeder, breeder.children(herd.matrices, size))
        herd = herd.joined(children).best(size)
        age = age + 1 if herd.marks[0] == leader else 0
        leader = herd.marks[0]
        if age >= patience:
            break
    final = np.rint(herd.matrices).astype(np.int64)
    return np.asarray(final[problem.rank(final)[0]])


@dataclass(frozen=True, slots=True)
class _Herd:
    """Candidates with their sort keys and marks, as :meth:`Breeder.judge` gives them."""

    matrices: Floats
    keys: Floats
    marks: Ints

    @classmethod
    def of(cls, breeder: Breeder, matrices: Floats) -> "_Herd":
        return cls(matrices, *breeder.judge(matrices))

    def joined(self, other: "_Herd") -> "_Herd":
        return _Herd(
            np.concatenate([self.matrices, other.matrices]),
            np.concatenate([self.keys, other.keys], axis=1),
            np.concatenate([self.marks, other.marks]),
        )

    def best(self, size: int) -> "_Herd":
        """The ``size`` best different candidates, best first; equal ones have equal keys: neighbours."""
        order = np.lexsort(self.keys)
        marks = self.marks[order]
        order = order[np.concatenate([[True], marks[1:] != marks[:-1]])][:size]
        return _Herd(self.matrices[order], self.keys[:, order], self.marks[order])


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
