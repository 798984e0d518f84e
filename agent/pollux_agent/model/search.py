"""The best batch split of models that share the paper's equations, for many placements and jobs at once.

With g(m) = alpha + beta m, J(m) = (g^gamma + S^gamma)^(1 / gamma), T = s g + J and c = K (s + 1), goodput is
highest where F(m, s) = (phi + c m) T(m) / (m (s + 1)) is least (Pollux Eq. 1, 7, 10, 11). Two facts make
the search short:

- At given m, F = const + K m g u + phi (J - g) / u with u = s + 1, so the best is
  u* = sqrt(phi (J - g) / (K m g)). The same M in more pieces is never faster (g^gamma is superadditive), so
  s beyond 0 only pays at a full GPU, and the best s is near u* at the largest m: a few candidates do.
- At given s, F has one minimum in m, where phi (T - m T') = c m^2 T' (T is convex in m). Newton steps on the
  logarithm of both sides, in log m, find it; for gamma = 1 the first one does.

The formulas are written once, for floats and for arrays: ``lib`` is :class:`Floats` or numpy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pollux_agent.model.throughput import FloatArray, IntArray

Number = Any
"""A float or an array; all arrays of one problem broadcast against each other."""

CANDIDATES = 6
"""Values of s tried for each placement: one below the guess, and some above it for the rounding of m."""
FEW_SAMPLES = 8
"""Up to this largest m every m is tried instead, with the best s of each: whole numbers are coarse there."""
_NEWTON_STEPS = 4
_TINY = 1e-30
_ENDLESS = 1e18


class Floats:
    """The few functions that the formulas need, for plain numbers."""

    log = staticmethod(math.log)
    exp = staticmethod(math.exp)
    sqrt = staticmethod(math.sqrt)
    floor = staticmethod(math.floor)
    maximum = staticmethod(max)
    minimum = staticmethod(min)

    @staticmethod
    def where(condition: bool, yes: Number, no: Number) -> Number:
        return yes if condition else no


@dataclass(frozen=True, slots=True)
class Problem:
    """Placements to find splits for: times in seconds, noise and batches in samples, counts as floats."""

    alpha: Number
    beta: Number
    gamma: Number
    sync: Number
    replicas: Number
    noise: Number
    initial: Number
    max_batch: Number
    min_local: Number
    max_local: Number


def joined(problems: Sequence[Problem]) -> Problem:
    """Several problems of equally many placements as one, in order."""
    if len(problems) == 1:
        return problems[0]
    columns = []
    for field in fields(Problem):
        values = [np.asarray(getattr(problem, field.name)) for problem in problems]
        height = max(len(np.atleast_1d(problem.replicas)) for problem in problems)
        columns.append(np.concatenate([np.broadcast_to(value, (height, 1)) for value in values]))
    return Problem(*columns)


def search_one(problem: Problem) -> tuple[int, int, float]:
    """(m, s, goodput) for one placement, all of ``problem`` floats; goodput 0 where no split is allowed."""
    best = (0, 0, 0.0)
    if problem.max_local <= FEW_SAMPLES:
        tried = (_best_steps(problem, float(m), Floats) for m in range(1, FEW_SAMPLES + 1))
    else:
        first, last = _window(problem, Floats)
        tried = (_best_local(problem, first + i, Floats) for i in range(CANDIDATES) if first + i <= last)
    for local, steps, value in tried:
        if value > best[2]:
            best = (int(local), int(steps), float(value))
    return best


def search_all(problem: Problem) -> tuple[IntArray, IntArray, FloatArray]:
    """(m, s, goodput) of each placement; fields of ``problem`` have shape (n, 1), some may be floats."""
    first, last = _window(problem, np)
    local, steps, value = _best_local(problem, np.minimum(first + np.arange(CANDIDATES), last), np)
    if np.any(problem.max_local <= FEW_SAMPLES):
        few = _best_steps(problem, np.arange(1.0, FEW_SAMPLES + 1.0), np)
        small = np.where(problem.max_local <= FEW_SAMPLES, few[2], 0.0)
        local, steps = np.hstack([local, few[0]]), np.hstack([steps, few[1]])
        value = np.hstack([value, small])
    pick = np.argmax(value, axis=1)
    rows = np.arange(len(pick))
    return local[rows, pick].astype(np.int64), steps[rows, pick].astype(np.int64), value[rows, pick]


def _window(problem: Problem, lib: Any) -> tuple[Number, Number]:
    """The least and the largest s to try."""
    p = problem
    full = p.replicas * p.max_local
    least = -lib.floor(-p.initial / full) - 1
    most = lib.maximum(-lib.floor(-p.max_batch / full) - 1, least)
    grad = p.alpha + p.beta * p.max_local
    pieces = lib.sqrt(lib.minimum(p.noise, _ENDLESS) * _extra(p, grad, lib) / (full * grad))
    guess = lib.floor(lib.minimum(pieces, most + 1.0)) - 2
    spare = CANDIDATES - 2
    return lib.minimum(lib.maximum(guess, least), most), most + spare


def _best_local(problem: Problem, steps: Number, lib: Any) -> tuple[Number, Number, Number]:
    """(m, s, goodput) with the best whole m for each s; goodput 0 where no m is allowed."""
    p = problem
    parts = p.replicas * (steps + 1.0)
    low = lib.maximum(-lib.floor(-p.initial / parts), p.min_local)
    high = lib.minimum(lib.floor(p.max_batch / parts), p.max_local)
    high = lib.where(parts == 1.0, lib.minimum(high, _most_alone(p, lib)), high)
    allowed = low <= high
    high = lib.maximum(low, high)
    noise = lib.minimum(p.noise, _ENDLESS)
    local = lib.sqrt(low * high)
    for _ in range(_NEWTON_STEPS):
        local = lib.minimum(lib.maximum(_newton(p, local, steps, parts, noise, lib), low), high)
    below = lib.floor(local)
    above = lib.minimum(below + 1.0, high)
    lower, upper = _goodput(p, below, steps, parts, noise), _goodput(p, above, steps, parts, noise)
    value = lib.where(allowed, lib.maximum(lower, upper), 0.0)
    return lib.where(upper > lower, above, below), steps, value


def _best_steps(problem: Problem, local: Number, lib: Any) -> tuple[Number, Number, Number]:
    """(m, s, goodput) with the best whole s for each m; goodput 0 where no s is allowed."""
    p = problem
    parts = p.replicas * local
    grad = p.alpha + p.beta * local
    low = -lib.floor(-p.initial / parts)
    high = lib.floor(p.max_batch / parts)
    alone = lib.where(p.replicas == 1.0, local, 0.0)
    low = lib.where(alone > _most_alone(p, lib), lib.maximum(low, 2.0), low)
    allowed = lib.where(p.min_local <= local, lib.where(local <= p.max_local, low <= high, False), False)
    noise = lib.minimum(p.noise, _ENDLESS)
    pieces = lib.sqrt(noise * _extra(p, grad, lib) / (parts * grad))
    below = lib.minimum(lib.maximum(lib.floor(pieces), low), lib.maximum(low, high))
    above = lib.minimum(below + 1.0, lib.maximum(low, high))
    lower = _goodput(p, local, below - 1.0, p.replicas * below, noise)
    upper = _goodput(p, local, above - 1.0, p.replicas * above, noise)
    value = lib.where(allowed, lib.maximum(lower, upper), 0.0)
    return local + 0.0 * below, lib.where(upper > lower, above, below) - 1.0, value


def _most_alone(p: Problem, lib: Any) -> Number:
    """The largest m on one GPU without accumulation: above M0 gradients must be compared within a step."""
    return lib.maximum(p.initial, p.min_local)


def _extra(p: Problem, grad: Number, lib: Any) -> Number:
    """J - g: what synchronisation adds to a pass."""
    return lib.maximum(grad * (1.0 + (p.sync / grad) ** p.gamma) ** (1.0 / p.gamma) - grad, 0.0)


def _newton(p: Problem, local: Number, steps: Number, parts: Number, noise: Number, lib: Any) -> Number:
    """One Newton step in log m towards phi (T - m T') = c m^2 T'."""
    grad = p.alpha + p.beta * local
    ratio = (p.sync / grad) ** p.gamma
    whole = 1.0 + ratio
    share = whole ** (1.0 / p.gamma - 1.0)  # dJ / dg
    slope = p.beta * (steps + share) + _TINY
    rest = steps * p.alpha + grad * share * whole - p.beta * local * share + _TINY
    bend = p.beta * p.beta * (p.gamma - 1.0) * share * ratio / (whole * grad)
    error = lib.log(parts * local * local * slope / (noise * rest + _TINY))
    steepness = 2.0 + local * bend / slope + local * local * bend / rest
    return local * lib.exp(lib.minimum(lib.maximum(-error / steepness, -3.0), 3.0))


def _goodput(p: Problem, local: Number, steps: Number, parts: Number, noise: Number) -> Number:
    """Useful samples per second; Pollux Eq. 1."""
    grad = p.alpha + p.beta * local
    seconds = grad * (steps + (1.0 + (p.sync / grad) ** p.gamma) ** (1.0 / p.gamma))
    batch = parts * local
    return batch * (noise + p.initial) / ((noise + batch) * seconds)
