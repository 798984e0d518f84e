"""One decision as arrays: what each job would gain from each placement, and which matrices are allowed.

A candidate is an allocation matrix, GPUs per job (rows, in the snapshot's order) and node (columns); a
population is an array of shape (candidates, jobs, nodes).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import comb, prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pollux.policy.models import accepts, best_goodputs, job_limit, standing_jobs
from pollux.policy.tables import params_of
from pollux.snapshot import DEFAULT_RESTART_S, Job, Snapshot

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_Number = TypeVar("_Number", Ints, Floats)

SPEEDUP_FLOOR = 1e-3
"""Added to every SPEEDUP, so that a job without GPUs counts for little instead of making the mean 0."""

_FAIRNESS_P = -1.0
"""Default of p; Pollux section 4.2."""

_DIGITS = 9
_LEAST_AGE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the search needs to know; J jobs, N nodes, T GPU types.

    ``capacity`` (N), ``node_type`` (N) index of the GPU type, ``allowed`` (J, N), ``least`` and ``most``
    GPUs (J), ``pinned`` (J) rows that may not change, ``present`` (J, N) today's allocation as far as it
    still exists, ``goodput`` (J, T, nodes, GPUs), ``fair`` (J) goodput of the fair share, ``factor`` (J)
    the REALLOC_FACTOR of a change. ``part`` (J) is set where goodput counts virtual nodes of so many GPUs
    (:func:`pollux.policy.virtual.cut`).
    """

    capacity: Ints
    node_type: Ints
    allowed: Bools
    least: Ints
    most: Ints
    pinned: Bools
    present: Ints
    goodput: Floats
    fair: Floats
    fair_gpus: int
    factor: Floats
    fairness_p: float
    avoid_interference: bool = True
    part: Ints | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(jobs, nodes)."""
        jobs, nodes = self.present.shape
        return jobs, nodes

    @property
    def num_types(self) -> int:
        return int(self.goodput.shape[1])

    def parts(self, gpus: Ints, jobs: Ints) -> Ints:
        """How many nodes the GPUs that job ``jobs[i]`` has on one node count as; broadcast."""
        if self.part is None:
            return np.asarray(gpus > 0, dtype=np.int64)
        return np.asarray(-(-gpus // self.part[jobs]))

    def spans(self, rows: Ints, jobs: Ints) -> Ints:
        """How many nodes the row (..., n, nodes) of each job in ``jobs`` (n) counts as taking."""
        return np.asarray(self.parts(rows, jobs[:, None]).sum(axis=-1))

    def goodputs(self, population: Ints) -> Floats:
        """Predicted goodput of every job in every candidate; shape (candidates, jobs)."""
        kind = self.node_type[np.argmax(population > 0, axis=2)]
        rows = np.arange(population.shape[1])
        gpus = np.minimum(population.sum(axis=2), self.goodput.shape[3] - 1)
        return self.worth(rows, kind, self.spans(population, rows), gpus)

    def worth(self, jobs: Ints, kind: Ints, spans: Ints, gpus: Ints) -> Floats:
        """Entries of the table of goodputs, whose last number of nodes stands for any larger one."""
        return np.asarray(self.goodput[jobs, kind, np.minimum(spans, self.goodput.shape[2] - 1), gpus])

    def changed(self, population: Ints) -> Bools:
        """Which jobs' allocation a candidate changes; shape (candidates, jobs)."""
        return np.asarray(np.any(population != self.present, axis=2))

    def rank(self, population: Ints) -> tuple[Ints, Floats]:
        """Candidates from best to worst, and each one's FITNESS (Pollux Eq. 14) before sorting.

        Among equal ones first the fitness that leaves REALLOC_FACTOR out decides: the factor of a job that
        restarted often is 0, and without this rule it would not be given even a free GPU. Then fewer
        changes, fewer nodes, and GPUs to earlier jobs and earlier nodes.
        """
        jobs, nodes = self.shape
        fitness, order = self._sorted(
            self.goodputs(population) / self.fair,
            self.changed(population),
            np.count_nonzero(population, axis=(1, 2)),
            population.sum(axis=2) @ np.arange(jobs),
            population.sum(axis=1) @ np.arange(nodes),
        )
        return order, np.exp(fitness)

    def best_row(self, current: Ints, jobs: Ints, rows: Ints) -> int:
        """Which of ``rows`` (n, nodes), each in place of that of its job in ``jobs`` (n), makes the legal
        matrix ``current`` (jobs, nodes) the best by :meth:`rank`; -1 where that is ``current`` itself.
        """
        own, many = current[jobs], len(jobs) + 1
        each = np.arange(1, many)
        gpus = rows.sum(axis=1)
        kind = self.node_type[np.argmax(rows > 0, axis=1)]
        goodput = np.repeat(self.goodputs(current[None]), many, axis=0)
        goodput[each, jobs] = self.worth(jobs, kind, self.spans(rows, jobs), gpus)
        changed = np.repeat(self.changed(current[None]), many, axis=0)
        changed[each, jobs] = np.any(rows != self.present[jobs], axis=1)
        entries, to_jobs, to_nodes = (np.zeros(many, dtype=np.int64) for _ in range(3))
        entries[1:] = np.count_nonzero(rows, axis=1) - np.count_nonzero(own, axis=1)
        to_jobs[1:] = (gpus - own.sum(axis=1)) * jobs
        to_nodes[1:] = (rows - own) @ np.arange(rows.shape[1])
        _, order = self._sorted(goodput / self.fair, changed, entries, to_jobs, to_nodes)
        return int(order[0]) - 1

    def _sorted(
        self, speedup: Floats, changed: Bools, entries: Ints, to_jobs: Ints, to_nodes: Ints
    ) -> tuple[Floats, Ints]:
        """Logarithms of FITNESS, and the order of :meth:`rank`; arrays of all jobs, then of candidates."""
        penalised = np.where(changed, self.factor, 1.0) * speedup
        fitness = self._log_mean(penalised + SPEEDUP_FLOOR)
        unpenalised = self._log_mean(speedup + SPEEDUP_FLOOR)
        order = np.lexsort(
            (
                to_nodes,
                to_jobs,
                entries,
                changed.sum(axis=1),
                -np.round(unpenalised, _DIGITS),
                -np.round(fitness, _DIGITS),
            )
        )
        return fitness, order

    def _log_mean(self, values: Floats) -> Floats:
        """Logarithm of the power mean over the last axis; p = 0 is the geometric mean."""
        logs = np.log(values)
        p = self.fairness_p
        if abs(p) < 1e-6:
            return np.asarray(logs.mean(axis=-1))
        return np.asarray(np.logaddexp.reduce(p * logs - np.log(logs.shape[-1]), axis=-1) / p)

    def repair(self, population: Ints, priority: Floats) -> Ints:
        """The population with every candidate made legal; legal ones stay as they are.

        Where jobs compete, the one of higher ``priority`` (candidates, jobs) wins.
        """
        priority = np.where(self.pinned, np.inf, priority)
        fixed = np.where(self.allowed, np.maximum(population, 0), 0)
        fixed = np.where(self.pinned[:, None], self.present, fixed)
        fixed = self.one_type(fixed)
        if self.avoid_interference:
            fixed = self._one_multi_node_job(fixed, priority)
        fixed = self._within_capacity(fixed, priority)
        fixed = np.where(self.pinned[:, None], fixed, _clip_sum(fixed, self.most[:, None], axis=2))
        useless = (fixed.sum(axis=2) < self.least) | (self.goodputs(fixed) <= 0)
        return np.where((useless & ~self.pinned)[:, :, None], 0, fixed)

    def one_type(self, population: _Number) -> _Number:
        """A job keeps only the GPUs of the type that it has most of."""
        if self.num_types == 1:
            return population
        of_type = self.node_type[:, None] == np.arange(self.num_types)
        most = np.argmax(population @ of_type.astype(population.dtype), axis=2)
        return np.where(self.node_type == most[:, :, None], population, 0)

    def _one_multi_node_job(self, population: Ints, priority: Floats) -> Ints:
        """Each node keeps at most one job that spans nodes (interference avoidance, Pollux 4.2.1)."""
        spans = np.count_nonzero(population, axis=2) > 1
        rivals = spans[:, :, None] & (population > 0)
        strength = np.where(rivals, priority[:, :, None], -np.inf)
        winner = np.argmax(strength, axis=1)
        loses = rivals & (np.arange(population.shape[1])[:, None] != winner[:, None, :])
        return np.where(loses & ~self.pinned[:, None], 0, population)

    def _within_capacity(self, population: Ints, priority: Floats) -> Ints:
        """Each node serves jobs in order of priority until its GPUs are gone."""
        if np.all(population.sum(axis=1) <= self.capacity):
            return population
        order = np.argsort(-priority, axis=1, kind="stable")[:, :, None]
        served = _clip_sum(np.take_along_axis(population, order, axis=1), self.capacity, axis=1)
        fixed = np.empty_like(population)
        np.put_along_axis(fixed, np.broadcast_to(order, population.shape), served, axis=1)
        return fixed

    def rows(self, current: Ints, jobs: Ints, gpus: Ints, kind: Ints) -> Ints:
        """Rows (n, nodes) with which job ``jobs[i]`` would get ``gpus[i]`` GPUs of type ``kind[i]``, and the
        legal matrix ``current`` (jobs, nodes) stay legal.

        A job gets what is free, on as few nodes as it can, those that it has first; nothing where that is of
        no use to it.
        """
        own = current[jobs]
        free = np.maximum(self.capacity - (current.sum(axis=0) - own), 0)
        free = np.where(self.allowed[jobs] & (self.node_type == kind[:, None]), free, 0)
        gpus = gpus[:, None]
        whole = free >= gpus
        spans = np.count_nonzero(current, axis=1) > 1
        taken = (current[spans] > 0).sum(axis=0) - (spans[jobs][:, None] & (own > 0)) > 0
        taken &= self.avoid_interference
        free = np.where(taken & ~np.any(whole, axis=1, keepdims=True), 0, free)
        wish = np.where(whole, free - 2.0 * self.capacity.max(), -free) - 0.5 * (own > 0)
        order = np.argsort(wish, axis=1, kind="stable")
        row = np.empty_like(free)
        np.put_along_axis(
            row, order, _clip_sum(np.take_along_axis(free, order, axis=1), gpus, axis=1), axis=1
        )
        held = row.sum(axis=1)
        goodput = self.worth(jobs, kind, self.spans(row, jobs), held)
        useless = (held < self.least[jobs]) | (goodput <= 0)
        return np.where(self.pinned[jobs][:, None], own, np.where(useless[:, None], 0, row))


def _clip_sum(values: Ints, limit: Ints, axis: int) -> Ints:
    """``values`` with what comes after the running sum along ``axis`` reaches ``limit`` cut off."""
    before = np.cumsum(values, axis=axis) - values
    return np.clip(limit - before, 0, values)


def formulate(snapshot: Snapshot) -> Problem:
    """The arrays of a snapshot with at least one job and one GPU."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    capacity = np.array([node.gpus for node in nodes], dtype=np.int64)
    types = fastest_first(jobs, sorted({node.gpu_type for node in nodes}))
    node_type = np.array([types.index(node.gpu_type) for node in nodes], dtype=np.int64)
    allowed = np.array([[accepts(job, node) for node in nodes] for job in jobs], dtype=np.bool_)
    present = _present(snapshot)
    total = int(capacity.sum())
    most = np.array([min(job_limit(job), total) for job in jobs], dtype=np.int64)
    pinned = np.array([not job.preemptible for job in jobs]) & np.any(present > 0, axis=1)
    fair_gpus = -(-total // len(jobs))
    largest = max(fair_gpus, int(most.max()), int(present.sum(axis=1).max()))
    goodput = _goodput_tables(jobs, types, len(nodes), largest)
    return Problem(
        capacity=capacity,
        node_type=node_type,
        allowed=allowed,
        least=np.array([job.min_gpus for job in jobs], dtype=np.int64),
        most=most,
        pinned=pinned,
        present=present,
        goodput=goodput,
        fair=fair_goodput(goodput, fair_gpus, capacity, node_type),
        fair_gpus=fair_gpus,
        factor=np.array([realloc_factor(job) for job in jobs]),
        fairness_p=_FAIRNESS_P if snapshot.policy.fairness_p is None else snapshot.policy.fairness_p,
        avoid_interference=snapshot.policy.avoid_interference,
    )


def fastest_first(jobs: Sequence[Job], types: list[str]) -> list[str]:
    """The types of GPU by how fast jobs compute on them, so that a tie between two goes to the faster.

    Sia section 4.3. A type's speed is the mean logarithm of the jobs' speed on one GPU of it.
    """
    params, fitted = params_of(jobs, types)
    if len(types) == 1 or not np.any(fitted):
        return types
    limits = [max(job.max_local_batch_size, job.min_local_batch_size) for job in jobs]
    samples = np.array(limits, dtype=np.float64)[fitted, None]
    seconds = params[fitted, :, 0] + params[fitted, :, 1] * samples
    speed = -np.round(np.log(seconds).mean(axis=0), _DIGITS)
    return [types[index] for index in np.argsort(-speed, kind="stable")]


def realloc_factor(job: Job) -> float:
    """What a change leaves of the job's SPEEDUP: max((T - R delta) / (T + delta), 0); Pollux Eq. 16.

    A job counts as at least a second old, or one that arrives in the very moment of a decision would gain
    nothing by starting, and its GPUs would go to another one for a cycle.
    """
    delta = DEFAULT_RESTART_S if job.restart_s is None else job.restart_s
    age_s = max(job.age_s, _LEAST_AGE_S)
    return max((age_s - job.restarts * delta) / (age_s + delta), 0.0)


def _present(snapshot: Snapshot) -> Ints:
    """Today's allocation (jobs, nodes); the rows of jobs whose GPUs are not there any more are 0."""
    index = {node.name: column for column, node in enumerate(snapshot.nodes)}
    standing = standing_jobs(snapshot)
    present = np.zeros((len(snapshot.jobs), len(snapshot.nodes)), dtype=np.int64)
    for row, job in enumerate(snapshot.jobs):
        if job.job_id in standing:
            for name, gpus in job.placement.items():
                present[row, index[name]] = gpus
    return present


def _goodput_tables(jobs: tuple[Job, ...], types: list[str], num_nodes: int, largest: int) -> Floats:
    """Goodput of each job per type, node count and GPU count; 0 where the placement cannot be."""
    spans, gpus = np.meshgrid(np.arange(num_nodes + 1), np.arange(largest + 1), indexing="ij")
    possible = (spans >= 1) & (gpus >= spans)
    tables = np.zeros((len(jobs), len(types), num_nodes + 1, largest + 1))
    usable = np.array([[not job.gpu_types or kind in job.gpu_types for kind in types] for job in jobs])
    values = best_goodputs(jobs, types, spans[possible], gpus[possible])
    tables[:, :, possible] = np.where(usable[:, :, None], values, 0.0)
    return tables


def fair_goodput(goodput: Floats, fair_gpus: int, capacity: Ints, node_type: Ints) -> Floats:
    """Goodput (J) on the fair share, ceil(GPUs / jobs) on the fewest nodes of the best type.

    Where the job cannot use just that many GPUs, the nearest count below that it can use, else above.
    """
    per_type = []
    for kind in range(goodput.shape[1]):
        sizes = capacity[node_type == kind]
        width = max(int(sizes.max(initial=1)), 1)
        counts = np.arange(1, min(goodput.shape[3] - 1, max(int(sizes.sum()), 1)) + 1)
        spans = np.minimum(-(-counts // width), goodput.shape[2] - 1)
        distance = np.where(counts <= fair_gpus, fair_gpus - counts, counts + fair_gpus)
        nearest = np.argsort(distance, kind="stable")
        values = goodput[:, kind, spans[nearest], counts[nearest]]
        first = np.argmax(values > 0, axis=1)
        per_type.append(values[np.arange(len(values)), first])
    fair = np.max(per_type, axis=0)
    return np.asarray(np.where(fair > 0, fair, 1.0))


def all_matrices(problem: Problem, most: int) -> Ints | None:
    """Every legal candidate, or None if the cluster is so large that there are more than ``most`` to try."""
    movable = np.flatnonzero(~problem.pinned)
    free = problem.capacity - problem.present[problem.pinned].sum(axis=0)
    if prod(comb(int(gpus) + len(movable), len(movable)) for gpus in free) > most:
        return None
    columns = [list(_splits(int(gpus), len(movable))) for gpus in free]
    combined = np.array(list(product(*columns)), dtype=np.int64).transpose(0, 2, 1)
    population = np.zeros((len(combined), *problem.shape), dtype=np.int64)
    population[:, movable] = combined
    population[:, problem.pinned] = problem.present[problem.pinned]
    legal = problem.repair(population, np.zeros(population.shape[:2])) == population
    return population[np.all(legal, axis=(1, 2))]


def _splits(gpus: int, jobs: int) -> Iterator[tuple[int, ...]]:
    """Every way to give up to ``gpus`` GPUs to that many jobs."""
    if jobs == 0:
        yield ()
        return
    for first in range(gpus + 1):
        for rest in _splits(gpus - first, jobs - 1):
            yield (first, *rest)
