"""At most one option a job within the capacities, at the highest total gain: an integer program on HiGHS.

What ends a solution early is a count or a gap, never seconds, so that the same input gives the same choice;
a wall-clock limit is only a safety net, and :class:`Choice` says whether it was used.
"""

from dataclasses import dataclass, replace

import highspy
import numpy as np

from pollux.policy.options import Options
from pollux.policy.tables import Bools, Floats, Ints

_GAP = 1e-4
_NODES = 2_000
_SAFETY_S = 60.0
_WHOLE_PROGRAM = 2_000
"""Up to so many options the integer program is solved as a whole; above, what its relaxation leaves open."""

_UNDECIDED_JOBS = 60
_SAMPLE, _TURNS, _PROMISING, _MARGIN = 10, 4, 3, 0.1
_INTEGRAL = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``option`` (J) index of each job's option, -1 for none; ``gain`` in total, and its upper ``bound``.

    ``timed_out``: the safety net ended the search.
    """

    option: Ints
    gain: float
    bound: float
    timed_out: bool = False

    def better(self, other: "Choice") -> "Choice":
        """The one that gains more, this one where they are equal."""
        return replace(other, timed_out=self.timed_out) if other.gain > self.gain else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """A program's solution: ``value`` (O) of each option, ``prices`` of the capacities, and an upper bound of
    what it can gain as ``objective``. HiGHS took ``solver_s``. ``cut_short``: it may be far from the best, or
    nothing at all.
    """

    value: Floats
    prices: Floats
    objective: float
    solver_s: float
    timed_out: bool = False
    cut_short: bool = False


def choose(options: Options, gain: Floats, *, must: Bools) -> Choice:
    """The best choice; ``gain`` (O) is what an option is worth more than no GPU.

    Jobs that ``must`` (J) get an option get one even where it gains nothing.
    """
    jobs = len(options.fair)
    use = _useful(options, gain, must)
    if not len(use):
        return Choice(option=np.full(jobs, -1), gain=0.0, bound=0.0)
    if len(use) <= _WHOLE_PROGRAM:
        solved = _solve(options, gain, use, must, options.limit, integer=True)
        choice = _choice(options, gain, solved.value, solved.objective, solved.timed_out)
        return choice.better(_standing(options, gain, solved.objective)) if solved.cut_short else choice
    return _round(options, gain, use, must)


def _standing(options: Options, gain: Floats, bound: float) -> Choice:
    """Who holds GPUs keeps them, as far as the capacities allow: better than what a solver did not find."""
    left = options.limit.copy()
    value = np.zeros(len(options.job))
    for option in np.flatnonzero(options.keeps):
        entry = options.entry_option == option
        rows, amounts = options.entry_row[entry], options.entry_amount[entry]
        if np.all(amounts <= left[rows]):
            left[rows] -= amounts
            value[option] = 1.0
    return _choice(options, gain, value, bound, timed_out=False)


def relax(options: Options, gain: Floats, *, must: Bools) -> Relaxed:
    """The linear relaxation of the same program."""
    return _solve(options, gain, _useful(options, gain, must), must, options.limit, integer=False)


def _useful(options: Options, gain: Floats, must: Bools) -> Ints:
    return np.flatnonzero((gain > 0) | must[options.job])


def _sift(options: Options, gain: Floats, use: Ints, must: Bools) -> Relaxed:
    """The linear relaxation, solved over the few options of each job that its prices leave promising.

    First prices come from a sample of the jobs with as large a share of the capacities; options that the
    prices of a solution find missing are added, and it is solved again. The bound is the Lagrangian one, so
    it holds even where the turns do not suffice.
    """
    sample = use[options.job[use] % _SAMPLE == 0]
    nobody = np.zeros_like(must)
    prices = _solve(options, gain, sample, nobody, options.limit / _SAMPLE, integer=False).prices
    part = np.zeros(0, dtype=np.int64)
    relaxed: Relaxed | None = None
    for _ in range(_TURNS):
        reduced = gain - _charges(options, prices)
        best = np.zeros(len(must))
        np.maximum.at(best, options.job[use], reduced[use])
        order = use[np.lexsort((-reduced[use], options.job[use]))]
        rank = np.arange(len(order)) - np.searchsorted(options.job[order], options.job[order])
        first = rank < _PROMISING
        wanted = order[first & (must[options.job[order]] | (reduced[order] > -_MARGIN * best.max()))]
        if relaxed is None and not len(wanted):  # the sample's prices leave nobody more than equal jobs gain
            wanted = order[first]
        more = np.union1d(part, wanted)
        if relaxed is not None and len(more) == len(part):
            break
        part = more
        relaxed = _solve(options, gain, part, must, options.limit, integer=False)
        prices = relaxed.prices
    assert relaxed is not None
    reduced = gain - _charges(options, prices)
    best = np.where(must, -np.inf, 0.0)
    np.maximum.at(best, options.job[use], reduced[use])
    bound = float(best.sum() + prices @ options.limit)
    return replace(relaxed, objective=max(bound, relaxed.objective))


def _charges(options: Options, prices: Floats) -> Floats:
    """What each option (O) costs at the prices of the capacities."""
    charges = np.bincount(
        options.entry_option,
        weights=options.entry_amount * prices[options.entry_row],
        minlength=len(options.job),
    )
    return np.asarray(charges, dtype=np.float64)


def _round(options: Options, gain: Floats, use: Ints, must: Bools) -> Choice:
    """Keep what the relaxation settles, and solve the integer program for the few jobs that it leaves open.

    A basic solution has no more fractional jobs than there are capacities; some settled jobs join them, so
    that what is left over can be used: those that hold the smallest options.
    """
    relaxed = _sift(options, gain, use, must)
    count = _UNDECIDED_JOBS
    while True:
        undecided = _undecided(options, relaxed, count)
        solved = _settle(options, gain, use, must, relaxed, undecided)
        if solved.timed_out or not solved.cut_short or np.all(undecided):
            break
        count *= 4  # what is settled leaves those who must get something no room
    timed_out = solved.timed_out or relaxed.timed_out
    choice = _choice(options, gain, solved.value, relaxed.objective, timed_out)
    cut_short = solved.cut_short or relaxed.cut_short
    return choice.better(_standing(options, gain, relaxed.objective)) if cut_short else choice


def _undecided(options: Options, relaxed: Relaxed, count: int) -> Bools:
    """Which jobs (J) the relaxation leaves open, and of the settled ones ``count`` that hold least."""
    jobs = len(options.fair)
    if count >= jobs:
        return np.ones(jobs, dtype=np.bool_)
    settled = relaxed.value > 1 - _INTEGRAL
    taken = np.full(jobs, -1)
    taken[options.job[settled]] = np.flatnonzero(settled)
    fractional = np.unique(options.job[(relaxed.value > _INTEGRAL) & ~settled])
    rest = np.setdiff1d(np.arange(jobs), fractional)
    held = np.where(taken[rest] >= 0, options.gpus[taken[rest]], 0)
    others = rest[np.argsort(held, kind="stable")]
    waiting = others[np.sort(held, kind="stable") == 0][: count // 2]
    running = others[np.sort(held, kind="stable") > 0][: count - len(waiting)]
    undecided = np.zeros(jobs, dtype=np.bool_)
    undecided[np.concatenate([fractional, waiting, running])] = True
    return undecided


def _settle(
    options: Options, gain: Floats, use: Ints, must: Bools, relaxed: Relaxed, undecided: Bools
) -> Relaxed:
    """The integer program for the jobs that are ``undecided``, beside what the relaxation gives others."""
    fixed = np.flatnonzero((relaxed.value > 1 - _INTEGRAL) & ~undecided[options.job])
    is_fixed = np.zeros(len(options.job), dtype=np.bool_)
    is_fixed[fixed] = True
    entry = is_fixed[options.entry_option]
    spent = np.bincount(
        options.entry_row[entry], weights=options.entry_amount[entry], minlength=len(options.limit)
    )
    limit = options.limit - np.rint(spent).astype(np.int64)
    solved = _solve(options, gain, use[undecided[options.job[use]]], must & undecided, limit, integer=True)
    solved.value[fixed] = 1.0
    return solved


def _choice(options: Options, gain: Floats, value: Floats, bound: float, timed_out: bool) -> Choice:
    picked = np.flatnonzero(value > 0.5)
    option = np.full(len(options.fair), -1)
    option[options.job[picked]] = picked
    return Choice(option=option, gain=float(gain[picked].sum()), bound=bound, timed_out=timed_out)


def _solve(
    options: Options, gain: Floats, use: Ints, must: Bools, limit: Ints | Floats, *, integer: bool
) -> Relaxed:
    """Values of all options (those outside ``use`` are 0) and an upper bound of the gain."""
    rows, inverse = np.unique(options.job[use], return_inverse=True)
    place = np.full(len(options.job), -1)
    place[use] = np.arange(len(use))
    entry = np.flatnonzero(place[options.entry_option] >= 0)
    column = np.concatenate([np.arange(len(use)), place[options.entry_option[entry]]])
    row = np.concatenate([inverse, len(rows) + options.entry_row[entry]])
    amount = np.concatenate([np.ones(len(use)), options.entry_amount[entry].astype(np.float64)])
    order = np.lexsort((row, column))
    starts = np.searchsorted(column[order], np.arange(len(use))).astype(np.int32)
    lower = np.concatenate([must[rows].astype(np.float64), np.full(len(limit), -np.inf)])
    upper = np.concatenate([np.ones(len(rows)), limit.astype(np.float64)])

    solver = highspy.highs._Highs()  # Highs itself prints a banner before it can be told not to
    for name, value in _settings(integer=integer).items():
        solver.setOptionValue(name, value)
    solver.passModel(
        len(use),
        len(rows) + len(limit),
        len(order),
        int(highspy.MatrixFormat.kColwise),
        int(highspy.ObjSense.kMaximize),
        0.0,
        gain[use],
        np.zeros(len(use)),
        np.ones(len(use)),
        lower,
        upper,
        starts,
        row[order].astype(np.int32),
        amount[order],
        np.full(len(use), int(integer), dtype=np.int32),
    )
    solver.run()
    values = np.zeros(len(options.job))
    timed_out = solver.getModelStatus() == highspy.HighsModelStatus.kTimeLimit
    solution = solver.getSolution()
    if len(solution.col_value) == len(use):
        values[use] = solution.col_value
    duals = np.abs(np.array(solution.row_dual))[len(rows) :]
    info = solver.getInfo()
    bound = info.mip_dual_bound if integer else info.objective_function_value
    return Relaxed(
        value=values,
        prices=duals if len(duals) == len(limit) else np.zeros(len(limit)),
        objective=float(bound),
        solver_s=solver.getRunTime(),
        timed_out=timed_out,
        cut_short=timed_out or info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible,
    )


def _settings(*, integer: bool) -> dict[str, object]:
    settings: dict[str, object] = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "time_limit": _SAFETY_S,
    }
    if integer:
        settings |= {"mip_rel_gap": _GAP, "mip_max_nodes": _NODES}
    return settings
