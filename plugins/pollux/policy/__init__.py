"""Policies: pure functions from a snapshot to a decision, picked by the name in the snapshot."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pollux.errors import ConfigError
from pollux.policy import (
    ablation,
    fifo,
    fixed,
    gavel,
    optimus,
    ours,
    pollux,
    shockwave,
    sia,
    themis,
    tiresias,
)
from pollux.snapshot import Decision, Job, Snapshot

POLICIES: Mapping[str, Callable[[Snapshot], Decision]] = {
    "pollux": pollux.decide,
    "sia": sia.decide,
    "ours": ours.decide,
    "fifo-fixed": fixed.decide,
    "fifo": fifo.decide,
    "tiresias": tiresias.decide,
    "optimus": optimus.decide,
    "optimus-scaling": optimus.decide_scaling,
    "gavel": gavel.decide_throughput,
    "gavel-fairness": gavel.decide_fairness,
    "themis": themis.decide,
    "shockwave": shockwave.decide,
}

STUDIED = ablation.VARIANTS
"""Our policy less one ingredient each: for simulations that compare them with it, and refused elsewhere."""

ORACLES = frozenset({"optimus"})
"""Baselines that are oracles by definition: they alone see the ``oracle`` of a job."""

HEED_CLAIMS = frozenset({"sia", "ours"})
"""Policies that know reservations and the quotas of teams."""

HEED_PRIORITY = frozenset({"ours"})

HEED_FAIRNESS_P = frozenset({"pollux", "sia"})

HEED_SEED = frozenset({"pollux"})
"""Policies that draw random numbers."""

ALWAYS_APART = frozenset({"sia", "ours", "fifo-fixed", *STUDIED})
"""Policies under which no node serves two jobs that span nodes, whether or not interference is avoided."""

_CALCULABLE = 1e15
"""Seconds and steps above this, which nothing can have taken, count as this: products stay numbers."""

_FIGURES = (
    "age_s",
    "attained_gpu_s",
    "restart_s",
    "trained_s",
    "progress",
    "target_progress",
    "latency_limit_s",
)


def check_policy(name: str, field: str) -> None:
    """Raise ConfigError naming ``field`` for a policy that does not exist, or that is only studied."""
    if name not in POLICIES:
        which = "for simulations only" if name in STUDIED else "no policy"
        raise ConfigError(f"{field} is {name!r}, which is {which}; use one of {', '.join(POLICIES)}")


def decide(snapshot: Snapshot, *, studied: bool = False) -> Decision:
    """What the snapshot's policy answers; the same snapshot gives the same decision.

    Raises ConfigError for a policy that does not exist; where ``studied``, those of STUDIED do.
    """
    policy = STUDIED.get(snapshot.policy.name) if studied else None
    if policy is None:
        check_policy(snapshot.policy.name, "policy.name")
        policy = POLICIES[snapshot.policy.name]
    shown = tuple(_shown(job, oracle=snapshot.policy.name in ORACLES) for job in snapshot.jobs)
    if any(job is not seen for job, seen in zip(snapshot.jobs, shown, strict=True)):
        snapshot = replace(snapshot, jobs=shown)
    return policy(snapshot)


def _shown(job: Job, *, oracle: bool) -> Job:
    """What a policy sees of a job: its oracle only where it is for oracles, and figures to calculate with."""
    change: dict[str, Any] = {
        name: _CALCULABLE for name in _FIGURES if (getattr(job, name) or 0.0) > _CALCULABLE
    }
    if job.oracle is not None and not oracle:
        change["oracle"] = None
    return replace(job, **change) if change else job
