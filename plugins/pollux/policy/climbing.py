"""From one allocation uphill: GPUs pass from job to job as long as that raises the fitness.

A population finds what many changes together are worth, but where one more job asks for a GPU it takes long
to find out which single one is missed least, and moves other jobs about meanwhile.
"""

import numpy as np
from numpy.random import Generator

from pollux.policy.problem import SPEEDUP_FLOOR, Bools, Floats, Ints, Problem

_TAKERS = 16
"""Jobs tried as takers in each step; those without GPUs come first."""

_TRIED = 24
_STEPS = 200


def climb(problem: Problem, start: Ints, rng: Generator) -> Ints:
    """The legal matrix ``start`` (jobs, nodes), while there is a step that :meth:`Problem.rank` prefers.

    A step moves one GPU, two, or all that a job has on a node, or that are free there, to another job.
    """
    current = start
    for _ in range(_STEPS):
        candidates = np.concatenate([current[None], _steps(problem, current, rng)])
        legal = np.all(problem.repair(candidates, np.zeros(candidates.shape[:2])) == candidates, axis=(1, 2))
        candidates = candidates[legal]
        best = problem.rank(candidates)[0][0]
        if best == 0:
            break
        current = candidates[best]
    return current


def _steps(problem: Problem, current: Ints, rng: Generator) -> Ints:
    """The most promising steps, as matrices; not all of them need be legal."""
    taker = _takers(problem, current, rng)[:, None]
    giver, node, count = _offers(problem, current)
    if not len(giver):
        return np.zeros((0, *current.shape), dtype=np.int64)
    gives = giver >= 0
    row = np.maximum(giver, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        state = _State(problem, current)
        gain = state.gain(taker, node, count) + np.where(gives, state.gain(row, node, -count), 0.0)
    never = problem.pinned[taker] | (taker == giver) | ~problem.allowed[taker, node] | np.isnan(gain)
    gain = np.where(never, -np.inf, gain)
    order = np.argsort(-np.round(gain, 9).ravel(), kind="stable")[:_TRIED]
    order = order[gain.ravel()[order] > -np.inf]
    who, offer = np.unravel_index(order, gain.shape)
    each = np.arange(len(order))
    steps = np.repeat(current[None], len(order), axis=0)
    steps[each, taker[who, 0], node[offer]] += count[offer]
    given = np.flatnonzero(gives[offer])
    steps[given, giver[offer[given]], node[offer[given]]] -= count[offer[given]]
    return steps


def _takers(problem: Problem, current: Ints, rng: Generator) -> Ints:
    """Jobs (n) to try: those without GPUs, and some others, drawn anew each time."""
    order = rng.permutation(len(current))
    return order[np.argsort(current[order].sum(axis=1) > 0, kind="stable")][:_TAKERS]


def _offers(problem: Problem, current: Ints) -> tuple[Ints, Ints, Ints]:
    """(giver, node, GPUs) of all that could change hands; giver -1 where they are free."""
    free = problem.capacity - current.sum(axis=0)
    held = np.concatenate([np.where(problem.pinned[:, None], 0, current), np.maximum(free, 0)[None]])
    giver, node = np.nonzero(held)
    most = held[giver, node]
    parts = [(np.ones_like(most), most >= 1), (np.full_like(most, 2), most > 2), (most, most > 1)]
    giver = np.where(giver == len(current), -1, giver)
    return (
        np.concatenate([giver[use] for _, use in parts]),
        np.concatenate([node[use] for _, use in parts]),
        np.concatenate([count[use] for count, use in parts]),
    )


class _State:
    """What each job has in a matrix, and what a change of it is worth to the fitness."""

    def __init__(self, problem: Problem, current: Ints) -> None:
        self._problem, self._current = problem, current
        everyone = np.arange(len(current))
        self._gpus, self._spans = current.sum(axis=1), problem.spans(current, everyone)
        self._kind = problem.node_type[np.argmax(current > 0, axis=1)]
        self._off = current - problem.present
        self._differ = np.count_nonzero(self._off, axis=1)
        speedup = problem.goodputs(current[None])[0] / problem.fair
        self._worth = self._value(everyone, speedup, self._differ > 0)

    def gain(self, job: Ints, node: Ints, more: Ints) -> Floats:
        """What the job adds to the sum that fitness grows with, with ``more`` GPUs on the node; broadcast."""
        problem = self._problem
        held, off = self._current[job, node], self._off[job, node]
        gpus, after = self._gpus[job] + more, held + more
        spans = self._spans[job] + problem.parts(after, job) - problem.parts(held, job)
        kind = np.where(self._gpus[job] > 0, self._kind[job], problem.node_type[node])
        differ = self._differ[job] + (off + more != 0) - (off != 0)
        allowed = (gpus == 0) | ((gpus >= problem.least[job]) & (gpus <= problem.most[job]))
        allowed &= (after >= 0) & ((after == 0) | (kind == problem.node_type[node]))
        width, limit = problem.goodput.shape[3] - 1, problem.goodput.shape[2] - 1
        goodput = problem.goodput[job, kind, np.clip(spans, 0, limit), np.clip(gpus, 0, width)]
        value = self._value(job, goodput / problem.fair[job], differ > 0)
        return np.where(allowed, value - self._worth[job], -np.inf)

    def _value(self, job: Ints, speedup: Floats, changed: Bools) -> Floats:
        x = np.where(changed, self._problem.factor[job], 1.0) * speedup + SPEEDUP_FLOOR
        p = self._problem.fairness_p
        return np.log(x) if abs(p) < 1e-6 else np.sign(p) * x**p
