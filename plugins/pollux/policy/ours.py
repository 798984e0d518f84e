"""Our policy: the least weighted sum of slow-downs, where jobs that are nearly done weigh more.

It chooses among the configurations of the sia policy. What differs is what a configuration is worth:

    cost = priority (T / 1 s)^-0.5  fair / (goodput kept)

fair / goodput is the slow-down against the fair share, T the job's remaining time there, so that a short job
counts more than a long one, and kept the share of its time that is left after the restart that a change
takes. A job without GPUs costs a multiple of what its smallest configuration costs.
"""

import numpy as np

from pollux.policy.answer import answer, nothing
from pollux.policy.claims import must_get, remember, waiting_rounds
from pollux.policy.options import Options, options_of
from pollux.policy.outcome import Instance, best_plan
from pollux.policy.tables import Floats
from pollux.snapshot import DEFAULT_RESTART_S, Decision, Job, Snapshot

EXPONENT = -0.5
HORIZON_S = 600.0
NONE = 4.0
UNKNOWN_S = 1800.0
LEAST_S = 60.0


def decide(snapshot: Snapshot) -> Decision:
    """The best choice of configurations, placed; the same snapshot gives the same decision."""
    if not snapshot.jobs or not any(node.gpus for node in snapshot.nodes):
        return nothing(snapshot, "ours")
    plan = best_plan(formulate(snapshot, padded=padded) for padded in (False, True))
    granted = np.array([bool(placement) for placement in plan.placements], dtype=np.bool_)
    state = remember(snapshot, waiting_rounds(snapshot), granted)
    return answer(
        snapshot,
        plan.instance.options,
        plan.choice.option,
        plan.placements,
        policy="ours",
        objective=plan.gain,
        factor=plan.instance.factor,
        state=state | ({"timed_out": True} if plan.choice.timed_out else {}),
    )


def formulate(snapshot: Snapshot, *, padded: bool = False) -> Instance:
    """The program of a snapshot with at least one job and one GPU."""
    options = options_of(snapshot, padded=padded)
    remaining = remaining_s(snapshot, options)
    delta = np.array([_delta_s(job) for job in snapshot.jobs])
    return Instance(
        snapshot=snapshot,
        options=options,
        gain=gains(snapshot, options, remaining, delta),
        must=must_get(snapshot, options, waiting_rounds(snapshot)),
        factor=_kept(np.minimum(remaining, HORIZON_S), delta),
    )


def remaining_s(snapshot: Snapshot, options: Options) -> Floats:
    """Seconds (J) that each job would still take on its fair share, at least LEAST_S."""
    samples = np.array(
        [
            np.nan
            if job.target_progress is None or job.noise_scale is None or not job.fits
            else max(job.target_progress - job.progress, 0.0) * job.initial_batch_size
            for job in snapshot.jobs
        ]
    )
    known = samples / options.fair
    usual = float(np.nanmedian(known)) if np.any(np.isfinite(known)) else UNKNOWN_S
    return np.clip(np.where(np.isfinite(known), known, usual), LEAST_S, 1e8)


def gains(snapshot: Snapshot, options: Options, remaining: Floats, delta: Floats) -> Floats:
    """What each option (O) saves of a job's cost without GPUs."""
    priority = np.array([job.priority for job in snapshot.jobs])
    weight = priority * remaining**EXPONENT
    slowdown = options.fair[options.job] / options.goodput
    lasts = np.minimum(remaining[options.job] * slowdown, HORIZON_S)
    can_stay = np.zeros(len(snapshot.jobs), dtype=np.bool_)
    can_stay[options.job[options.keeps]] = True
    restarts = can_stay[options.job] & ~options.keeps
    kept = np.where(restarts, _kept(lasts, delta[options.job]), 1.0)
    cost = weight[options.job] * slowdown / kept
    most = np.zeros(len(snapshot.jobs))
    np.maximum.at(most, options.job, weight[options.job] * slowdown)
    gain = NONE * most[options.job] - cost
    scale = np.max(np.abs(gain), initial=1e-12)
    return np.asarray(np.maximum(gain / scale, -1.0) * 100)


def _kept(lasts_s: Floats, delta_s: Floats) -> Floats:
    """The share of its time that a job trains if it restarts now and then runs for ``lasts_s``."""
    return lasts_s / (lasts_s + delta_s)


def _delta_s(job: Job) -> float:
    return DEFAULT_RESTART_S if job.restart_s is None else job.restart_s
