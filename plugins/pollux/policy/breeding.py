"""New candidates of the population search: crossover, mutation and repair, a whole generation at a time.

Matrices are GPUs per job and node as floats, shape (candidates, jobs, nodes): whole numbers, which the
library for matrix products adds up exactly, and many times as fast as numpy's own sums over short axes.
"""

from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from pollux.policy.problem import SPEEDUP_FLOOR, Bools, Floats, Ints, Problem

_PRESSURE = 3
"""How strongly better candidates are preferred as parents: rank = size u^3, u uniform in [0, 1)."""

_CHANGES = (1.0, 0.4)
"""Chance of a first and of a second change to a child."""

_SET, _HAND_OVER, _SWAP, _BACK = 0.62, 0.77, 0.86, 0.94
"""Cumulated chances of the kinds of change; what is left makes one entry any number."""

_DIGITS = 9

_PRODUCT_JOBS = 150
"""Up to so many jobs a running sum over them is quicker as a product with a triangle of ones."""


class Breeder:
    """Makes and judges candidates for one problem."""

    def __init__(self, problem: Problem, rng: Generator) -> None:
        self._problem = problem
        self._rng = rng
        jobs, nodes = problem.shape
        self._capacity = problem.capacity.astype(np.float64)
        self._present = problem.present.astype(np.float64)
        self._pinned = np.flatnonzero(problem.pinned)
        self._most, self._least = problem.most.astype(np.float64), problem.least.astype(np.float64)
        self._allowed = None if problem.allowed.all() else problem.allowed.astype(np.float64)
        self._node_ones, self._job_ones = np.ones(nodes), np.ones((1, jobs))
        self._earlier = np.tri(jobs, k=-1) if jobs <= _PRODUCT_JOBS else None
        self._fixed_use, self._fixed_spans = self._use(self._present[None, self._pinned])
        self._code = np.column_stack([np.ones(nodes), rng.integers(1, 2**30, size=nodes)])
        self._present_code = (self._present @ self._code)[:, 1]
        self._job_code = rng.integers(1, 2**62, size=jobs) | 1
        spans = np.minimum([1, 2], problem.goodput.shape[2] - 1)
        speedup = problem.goodput[:, :, spans, :] / problem.fair[:, None, None, None]
        self._most_gpus = speedup.shape[3] - 1
        self._speedup = speedup.ravel()
        self._row = np.arange(jobs) * speedup[0].size
        self._factor = problem.factor
        self._part = None if problem.part is None else problem.part[:, None].astype(np.float64)

    def children(self, population: Floats, size: int) -> Floats:
        """``size`` new candidates, each legal, from a population sorted best first."""
        children = self._cross(population, size)
        priority = self._rng.random(children.shape[:2])
        for turn, chance in enumerate(_CHANGES):
            where = np.arange(size) if chance >= 1 else np.flatnonzero(self._rng.random(size) < chance)
            if len(where):
                self._change(children, where, priority, 2.0 + turn)
        return self.settle(children, priority)

    def judge(self, population: Floats) -> tuple[Floats, NDArray[np.int64]]:
        """Sort keys (keys, candidates), the last the most important, and a mark by which to tell equal ones.

        The keys are those of :meth:`Problem.rank`.
        """
        sums = np.matmul(population.reshape(-1, population.shape[2]), self._code)
        sums = sums.reshape(*population.shape[:2], 2)
        gpus, nodes_used = sums[:, :, 0], self._over_nodes(np.minimum(population, 1.0))
        spans = nodes_used if self._part is None else self._spans(population)
        speedup = self._speedups(population, gpus, spans)
        changed = sums[:, :, 1] != self._present_code
        penalised = np.where(changed, self._factor, 1.0) * speedup
        jobs, nodes = self._problem.shape
        keys = np.stack(
            [
                self._over_jobs(population) @ np.arange(nodes),
                gpus @ np.arange(jobs),
                nodes_used.sum(axis=1),
                changed.sum(axis=1),
                -np.round(self._log_mean(speedup), _DIGITS),
                -np.round(self._log_mean(penalised), _DIGITS),
            ]
        )
        return keys, (sums[:, :, 1].astype(np.int64) * self._job_code).sum(axis=1)

    def settle(self, population: Floats, priority: Floats) -> Floats:
        """The population with every candidate made legal; where jobs compete the higher priority wins."""
        problem = self._problem
        if self._allowed is not None:
            population = population * self._allowed
        if len(self._pinned):
            population[:, self._pinned] = self._present[self._pinned]
        if problem.num_types > 1:
            population = problem.one_type(population)
        use, spanning = self._use(population)
        wrong = np.any(use > self._capacity, axis=1)
        if problem.avoid_interference:
            wrong |= np.any(spanning > 1, axis=1)
        where = np.flatnonzero(wrong)
        if len(where):
            population[where] = self._resolve(population[where], priority[where])
        gpus = self._over_nodes(population)
        over = gpus > self._most
        over[:, self._pinned] = False
        if over.any():
            rows = population[over]
            limit = np.broadcast_to(self._most, over.shape)[over][:, None]
            before = np.cumsum(rows, axis=1) - rows
            population[over] = np.minimum(np.maximum(limit - before, 0.0), rows)
            gpus = self._over_nodes(population)
        spans = self._spans(population)
        useless = (gpus > 0) & ((gpus < self._least) | (self._speedups(population, gpus, spans) <= 0))
        useless[:, self._pinned] = False
        population[useless] = 0.0
        return population

    def _cross(self, population: Floats, size: int) -> Floats:
        """Children whose rows come from either of two parents, half of them from one parent alone."""
        ranks = (len(population) * self._rng.random((2, size)) ** _PRESSURE).astype(np.int64)
        mixed = size - size // 2
        jobs, nodes = self._problem.shape
        parent = np.repeat(ranks[0], jobs).reshape(size, jobs)
        from_mother = self._rng.random((mixed, jobs)) < 0.5
        parent[:mixed] = np.where(from_mother, ranks[1][:mixed, None], parent[:mixed])
        rows = (parent * jobs + np.arange(jobs)).ravel()
        return population.reshape(-1, nodes).take(rows, axis=0).reshape(size, jobs, nodes)

    def _change(self, children: Floats, where: Ints, priority: Floats, rank: float) -> None:
        """One change to each of the children ``where``."""
        problem, rng = self._problem, self._rng
        jobs, nodes = problem.shape
        move = rng.random(len(where))
        job, other = rng.integers(jobs, size=(2, len(where)))
        place = move < _SET
        rows, mine = where[place], job[place]
        evict = rng.random(len(rows)) < 0.5
        children[rows, mine] = self._placed(children[rows], mine, evict)
        priority[rows[evict], mine[evict]] = rank
        hand = (move >= _SET) & (move < _HAND_OVER) & (job != other)
        node = rng.integers(nodes, size=len(where))
        one = np.minimum(children[where[hand], job[hand], node[hand]], 1.0)
        children[where[hand], job[hand], node[hand]] -= one
        children[where[hand], other[hand], node[hand]] += one
        swap = (move >= _HAND_OVER) & (move < _SWAP)
        rows, mine, theirs = where[swap], job[swap], other[swap]
        children[rows, mine], children[rows, theirs] = children[rows, theirs], children[rows, mine]
        back = (move >= _SWAP) & (move < _BACK)
        children[where[back], job[back]] = self._present[job[back]]
        entry = move >= _BACK
        number = np.floor(rng.random(np.count_nonzero(entry)) * (self._capacity[node[entry]] + 1.0))
        children[where[entry], job[entry], node[entry]] = number

    def _placed(self, some: Floats, job: Ints, evict: Bools) -> Floats:
        """Another number of GPUs for job ``job[i]`` of candidate i, on as few nodes as they fit; its new row.

        It gets what is free, the nodes that it has first; where ``evict``, all that is not pinned counts as
        free, and :meth:`settle` decides who yields.
        """
        rng, problem, rows = self._rng, self._problem, np.arange(len(some))
        own = some[rows, job]
        held = own @ self._node_ones
        most = self._most[job]
        near = np.clip(held + rng.integers(-2, 3, size=len(rows)), 0.0, most)
        gpus = np.where(rng.random(len(rows)) < 0.5, np.floor(rng.random(len(rows)) * (most + 1.0)), near)[
            :, None
        ]
        use, spanning = self._use(some)
        mine = np.minimum(own, 1.0)
        spanning = spanning - np.where((mine @ self._node_ones)[:, None] > 1, mine, 0.0)
        use = np.where(evict[:, None], self._fixed_use, use - own)
        spanning = np.where(evict[:, None], self._fixed_spans, spanning)
        free = np.maximum(self._capacity - use, 0.0)
        if self._allowed is not None:
            free *= self._allowed[job]
        if problem.num_types > 1:
            kind = rng.integers(problem.num_types, size=len(rows))
            free *= problem.node_type == kind[:, None]
        whole = free >= gpus
        if problem.avoid_interference:
            free[(spanning > 0) & ~np.any(whole, axis=1, keepdims=True)] = 0.0
        wish = np.where(whole, free - 2.0 * self._capacity.max(), -free) - 0.5 * mine
        order = np.argsort(wish, axis=1, kind="stable")
        sorted_free = np.take_along_axis(free, order, axis=1)
        before = np.cumsum(sorted_free, axis=1) - sorted_free
        row = np.empty_like(free)
        np.put_along_axis(row, order, np.minimum(np.maximum(gpus - before, 0.0), sorted_free), axis=1)
        return row

    def _resolve(self, some: Floats, priority: Floats) -> Floats:
        """Candidates within capacity; where asked for, a node has at most one job that spans nodes."""
        priority[:, self._pinned] = np.inf
        order = np.argsort(-priority, axis=1, kind="stable")
        flat = (order + len(order[0]) * np.arange(len(order))[:, None]).ravel()
        shape, nodes = some.shape, some.shape[2]
        some = some.reshape(-1, nodes).take(flat, axis=0).reshape(shape)
        if self._problem.avoid_interference:
            used = np.minimum(some, 1.0)
            used *= self._over_nodes(used)[:, :, None] > 1
            loses = (self._before(used) >= 1) & (used > 0)
            loses[:, : len(self._pinned)] = False
            some[loses] = 0.0
        served = self._before(some)
        np.subtract(self._capacity, served, out=served)
        np.maximum(served, 0.0, out=served)
        np.minimum(served, some, out=served)
        some.reshape(-1, nodes)[flat] = served.reshape(-1, nodes)
        return some

    def _before(self, population: Floats) -> Floats:
        """What earlier jobs have on each node, for every job; shape (candidates, jobs, nodes)."""
        if self._earlier is None:
            return np.asarray(np.cumsum(population, axis=1) - population)
        return np.asarray(np.matmul(self._earlier, population))

    def _spans(self, population: Floats) -> Floats:
        """:meth:`Problem.spans`; shape (candidates, jobs)."""
        if self._part is None:
            return self._over_nodes(np.minimum(population, 1.0))
        return self._over_nodes(np.ceil(population / self._part))

    def _over_nodes(self, population: Floats) -> Floats:
        """Sums over nodes; shape (candidates, jobs)."""
        sums = population.reshape(-1, population.shape[2]) @ self._node_ones
        return np.asarray(sums.reshape(population.shape[:2]))

    def _over_jobs(self, population: Floats) -> Floats:
        """Sums over jobs; shape (candidates, nodes)."""
        return np.asarray(np.matmul(self._job_ones[:, : population.shape[1]], population)[:, 0, :])

    def _use(self, population: Floats) -> tuple[Floats, Floats]:
        """GPUs in use, and jobs that span nodes, on each node; shape (candidates, nodes) each."""
        used = np.minimum(population, 1.0)
        spans = self._over_nodes(used) > 1
        spanning = np.matmul(spans.astype(np.float64)[:, None, :], used)[:, 0, :]
        return self._over_jobs(population), spanning

    def _speedups(self, population: Floats, gpus: Floats, spans: Floats) -> Floats:
        problem, width = self._problem, self._most_gpus + 1
        index = np.minimum(gpus, self._most_gpus).astype(np.int64) + self._row
        index += (spans > 1) * width
        if problem.num_types > 1:
            index += problem.node_type[np.argmax(population > 0, axis=2)] * (2 * width)
        return np.asarray(self._speedup[index])

    def _log_mean(self, speedup: Floats) -> Floats:
        """Logarithm of the power mean over jobs of SPEEDUP and its floor; Pollux Eq. 14."""
        logs: Any = np.log(speedup + SPEEDUP_FLOOR)
        p = self._problem.fairness_p
        if abs(p) < 1e-6:
            return np.asarray(logs.mean(axis=1))
        logs *= p
        top = logs.max(axis=1)
        return np.asarray((top + np.log(np.exp(logs - top[:, None]).mean(axis=1))) / p)
