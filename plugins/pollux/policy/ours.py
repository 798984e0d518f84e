"""Our policy: the least weighted sum of slow-downs, where jobs with less left to do weigh more.

It chooses among the configurations of the sia policy. What differs is what a configuration costs:

    cost = priority rank^RANK  fair / (goodput kept)

fair / goodput is the slow-down against the fair share; rank, in (0, 1], is the share of jobs that have at
least as long to go as this one; kept is the share of its time that is left after the restart that a change
takes, where the next allocation is expected to last as long as the job's earlier ones did. A job that weighs
little and has only just restarted would be pushed about by the others; so fewer GPUs, or none, cost it a
share of its slow-down besides, the greater the shorter it could train on what it has. A job without GPUs
costs a multiple of what its smallest configuration costs. Goodput is what it will be a while from now, since
the noise of a job's gradients, and with it the use of large batches, grows as it trains.

Weights by rank follow heSRPT (Berg, Vesilo and Harchol-Balter, 2020): for jobs whose speed-up on k GPUs is
k^p the mean completion time is least if shares depend on the order of remaining sizes alone, about as
rank^(p / (1 - p)). The least sum of weight / k^p has these shares where weight = rank^(p (1 + p) / (1 - p));
RANK is that of p = 0.5.
"""

import numpy as np

from pollux.policy.claims import must_get, waiting_rounds
from pollux.policy.options import Options, options_of
from pollux.policy.outcome import Instance, decide_by_program
from pollux.policy.tables import Floats
from pollux.snapshot import DEFAULT_RESTART_S, Decision, Job, Snapshot

RANK = 1.5
"""How much more jobs count that have less to do; 0 is a plain sum of slow-downs."""

HORIZON_S = 200.0
"""What an allocation is expected to last at least, unless its job ends before."""

STEADY = 0.05
"""What a change has to bring besides its restart: estimates waver by as much."""

SHRINK = 0.3
"""Least weight of a restart that a job suffers for the sake of others."""

NONE = 4.0
"""What no GPU costs, as a multiple of a job's smallest configuration."""

MOST_RESTART_S = 3600.0
"""No restart is taken to be longer."""

SPREAD = 10.0
"""By so much more than in proportion to GPUs a job's smallest configuration may be slower than its fair
share, as on another type of GPU. What a job says of itself beyond that would only drown what others gain."""

UNKNOWN_S = 1800.0
"""Remaining time of jobs that do not say where they end; of no use where others do: then their median."""


def decide(snapshot: Snapshot) -> Decision:
    """The best choice of configurations, placed; the same snapshot gives the same decision."""
    return decide_by_program(snapshot, "ours", formulate)


def formulate(snapshot: Snapshot, *, padded: bool = False) -> Instance:
    """The program of a snapshot with at least one job and one GPU."""
    options = options_of(snapshot, padded=padded, noise_growth=noise_growth(snapshot))
    remaining = remaining_s(snapshot, options)
    delta = np.array([_delta_s(job) for job in snapshot.jobs])
    return Instance(
        snapshot=snapshot,
        options=options,
        gain=gains(snapshot, options, remaining, delta),
        must=must_get(snapshot, options, waiting_rounds(snapshot)),
        factor=_kept(np.minimum(remaining, expected_s(snapshot)), delta),
    )


def noise_growth(snapshot: Snapshot) -> Floats:
    """By how much each job's noise scale (J) will have grown when its next allocation has lasted its least.

    Noise grows as a training goes on (McCandlish et al. 2018) and is taken to be in proportion to its age: in
    the six trainings that Pollux's authors recorded it goes with the 0.9th to 2.3rd power of progress. Else a
    young job would get GPUs for the batches of a moment ago, and soon restart for more.
    """
    age_s = np.array([job.age_s for job in snapshot.jobs])
    return np.asarray(1.0 + HORIZON_S / np.maximum(age_s, max(snapshot.interval_s, 1.0)))


def remaining_s(snapshot: Snapshot, options: Options) -> Floats:
    """Seconds (J) that each job would still take on its fair share, at least 1."""
    samples = np.array(
        [
            np.nan
            if job.target_progress is None
            else max(job.target_progress - job.progress, 0.0) * job.initial_batch_size
            for job in snapshot.jobs
        ]
    )
    told = options.fitted & ~np.isnan(samples)
    usual = float(np.median(samples[told] / options.fair[told])) if np.any(told) else UNKNOWN_S
    with np.errstate(over="ignore"):
        return np.clip(np.where(told, samples / options.fair, usual), 1.0, 1e9)


def expected_s(snapshot: Snapshot) -> Floats:
    """Seconds (J) for which each job's next allocation will last if nothing ends it."""
    past_s = np.array([job.age_s / (job.restarts + 1) for job in snapshot.jobs])
    return np.asarray(np.maximum(past_s, HORIZON_S))


def lasted_s(snapshot: Snapshot) -> Floats:
    """Seconds (J) that each job has trained on what it holds; where that is unknown, its mean so far."""
    known = [
        job.age_s / (job.restarts + 1) if job.trained_s is None else job.trained_s for job in snapshot.jobs
    ]
    return np.asarray(np.maximum(np.array(known), max(snapshot.interval_s, 1.0)))


def gains(snapshot: Snapshot, options: Options, remaining: Floats, delta: Floats) -> Floats:
    """What each option (O) saves of a job's cost without GPUs, the largest saving being 100."""
    jobs = len(snapshot.jobs)
    priority = np.array([job.priority for job in snapshot.jobs])
    rank = (jobs - np.searchsorted(np.sort(remaining), remaining)) / jobs
    weight = priority * rank**RANK
    can_stay = np.zeros(jobs, dtype=np.bool_)
    can_stay[options.job[options.keeps]] = True
    wasted = np.maximum(SHRINK * priority - weight, 0.0) * (1.0 / _kept(lasted_s(snapshot), delta) - 1.0)
    wasted = np.where(can_stay, wasted, 0.0)
    job = options.job
    slowdown = options.fair[job] / options.goodput
    lasts = np.minimum(remaining[job] * slowdown, expected_s(snapshot)[job])
    restarts = can_stay[job] & ~options.keeps
    fewer = restarts & (options.goodput < options.now[job])
    cost = weight[job] * slowdown / np.where(restarts, _kept(lasts, delta[job]), 1.0)
    cost += np.where(fewer, wasted[job] * slowdown, 0.0)
    gain = (NONE * (weight + wasted) * _smallest(options, slowdown))[job] - cost
    return np.asarray(100.0 * np.clip(gain / np.max(gain, initial=1e-12), -1.0, 1.0))


def _smallest(options: Options, slowdown: Floats) -> Floats:
    """The slow-down (J) of each job's smallest configuration, on the type that serves it worst."""
    jobs = len(options.fair)
    least = np.full(jobs, np.iinfo(np.int64).max)
    np.minimum.at(least, options.job, options.gpus)
    worst = np.zeros(jobs)
    is_least = options.gpus == least[options.job]
    np.maximum.at(worst, options.job[is_least], slowdown[is_least])
    return np.minimum(worst, SPREAD * np.maximum(options.fair_gpus / least, 1.0))


def _kept(lasts_s: Floats, delta_s: Floats) -> Floats:
    """The share of its time that a job trains if it restarts now and then runs for ``lasts_s``."""
    return np.asarray(1.0 / (1.0 + STEADY + delta_s / lasts_s))


def _delta_s(job: Job) -> float:
    return DEFAULT_RESTART_S if job.restart_s is None else min(job.restart_s, MOST_RESTART_S)
