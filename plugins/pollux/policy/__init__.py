"""Policies: pure functions from a snapshot to a decision, picked by the name in the snapshot."""

from collections.abc import Callable, Mapping
from dataclasses import replace

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
from pollux.snapshot import Decision, Snapshot

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
"""Our policy less one ingredient each: for simulations that compare them with it, and not for use."""

ORACLES = frozenset({"optimus"})
"""Baselines that are oracles by definition: they alone see the ``oracle`` of a job."""

HEED_CLAIMS = frozenset({"sia", "ours"})
"""Policies that know reservations and the quotas of teams."""

HEED_PRIORITY = frozenset({"ours"})

HEED_FAIRNESS_P = frozenset({"pollux", "sia"})

ALWAYS_APART = frozenset({"sia", "ours", "fifo-fixed", *STUDIED})
"""Policies under which no node serves two jobs that span nodes, whether or not interference is avoided."""


def decide(snapshot: Snapshot) -> Decision:
    """What the snapshot's policy answers; the same snapshot gives the same decision.

    Raises ConfigError for a policy that does not exist.
    """
    policy = POLICIES.get(snapshot.policy.name) or STUDIED.get(snapshot.policy.name)
    if policy is None:
        raise ConfigError(
            f"policy.name is {snapshot.policy.name!r}, which is no policy; use one of {', '.join(POLICIES)}"
        )
    if snapshot.policy.name not in ORACLES and any(job.oracle is not None for job in snapshot.jobs):
        snapshot = replace(snapshot, jobs=tuple(replace(job, oracle=None) for job in snapshot.jobs))
    return policy(snapshot)
