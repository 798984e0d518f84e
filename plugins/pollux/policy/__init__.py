"""Policies: pure functions from a snapshot to a decision, picked by the name in the snapshot."""

from collections.abc import Callable, Mapping

from pollux.errors import ConfigError
from pollux.policy import fixed, pollux
from pollux.snapshot import Decision, Snapshot

POLICIES: Mapping[str, Callable[[Snapshot], Decision]] = {
    "pollux": pollux.decide,
    "fifo-fixed": fixed.decide,
}


def decide(snapshot: Snapshot) -> Decision:
    """What the snapshot's policy answers; the same snapshot gives the same decision.

    Raises ConfigError for a policy that does not exist.
    """
    policy = POLICIES.get(snapshot.policy.name)
    if policy is None:
        raise ConfigError(
            f"policy.name is {snapshot.policy.name!r}, which is no policy; use one of {', '.join(POLICIES)}"
        )
    return policy(snapshot)
