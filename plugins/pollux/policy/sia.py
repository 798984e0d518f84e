"""The Sia policy: goodput of whole configurations over several GPU types, an integer program (SOSP '23)."""

import numpy as np

from pollux.policy.claims import must_get, waiting_rounds
from pollux.policy.options import Options, options_of
from pollux.policy.outcome import Instance, decide_by_program
from pollux.policy.problem import realloc_factor
from pollux.policy.tables import Floats
from pollux.snapshot import Decision, PolicySettings, Snapshot

DEFAULT_P = -0.5
"""Fairness p; best of those tried in Sia section 5.7."""

_LEAST_FACTOR = 1e-3
_MOST = 1e6


def decide(snapshot: Snapshot) -> Decision:
    """The best choice of configurations, placed; the same snapshot gives the same decision."""
    return decide_by_program(snapshot, "sia", formulate)


def formulate(snapshot: Snapshot, *, padded: bool = False) -> Instance:
    """The program of a snapshot with at least one job and one GPU."""
    options = options_of(snapshot, padded=padded)
    factor = np.array([realloc_factor(job) for job in snapshot.jobs])
    return Instance(
        snapshot=snapshot,
        options=options,
        gain=gains(snapshot, options, factor, snapshot.policy),
        must=must_get(snapshot, options, waiting_rounds(snapshot)),
        factor=factor,
    )


def gains(snapshot: Snapshot, options: Options, factor: Floats, settings: PolicySettings) -> Floats:
    """What each option (O) is worth more than no GPU: A's coefficients in Sia Eq. 4.

    Goodput is normalised by the job's least goodput, times its least GPUs; an option that restarts a
    running job is discounted by Eq. 3; the result to the power p, the sign turned for p < 0, and lambda for
    a job that gets anything.
    """
    p = DEFAULT_P if settings.fairness_p is None else settings.fairness_p
    jobs = len(snapshot.jobs)
    lowest = np.full(jobs, np.inf)
    np.minimum.at(lowest, options.job, options.goodput)
    least = np.array([job.min_gpus for job in snapshot.jobs], dtype=np.float64)
    utility = least[options.job] * options.goodput / lowest[options.job]
    if settings.restart_discount:
        can_stay = np.zeros(jobs, dtype=np.bool_)
        can_stay[options.job[options.keeps]] = True
        restarts = can_stay[options.job] & ~options.keeps
        utility = np.where(restarts, np.maximum(factor, _LEAST_FACTOR)[options.job] * utility, utility)
    if abs(p) < 1e-6:
        value = np.log(utility)
    else:
        with np.errstate(over="ignore"):
            value = np.sign(p) * utility**p
    return np.asarray(np.clip(settings.no_allocation_penalty + value, -_MOST, _MOST))
