"""All workers or none: what a job falls back to while its whole allocation cannot start; pure."""

from dataclasses import dataclass

from pollux_agent.protocol import Allocation, JobSpec, Placement

FIRST_PAUSE_S = 60.0
EMPTY_PAUSE_S = 10.0
"""Before the first new try of a job that has nothing to fall back to."""
MAX_PAUSE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """For decision ``decision`` only ``placement`` is tried until ``until_unix_s``, because of ``reason``.

    ``over``: that was before; it is kept to wait longer each time the same decision fails.
    """

    decision: int
    placement: Placement
    reason: str
    pause_s: float
    until_unix_s: float
    over: bool = False

    def holds(self, allocation: Allocation, now_unix_s: float) -> bool:
        """Whether it still is about this allocation, and its time is not over, nor the clock set back."""
        in_time = 0 < self.until_unix_s - now_unix_s <= self.pause_s
        return not self.over and allocation.decision == self.decision and in_time


def narrow(
    allocation: Allocation,
    worked: Placement,
    *,
    spec: JobSpec,
    reason: str,
    before: Narrowed | None,
    now_unix_s: float,
) -> Narrowed:
    """Back to the GPUs that the job ``worked`` on last, as far as it is still given them, or to none.

    GPUs outside the allocation may be another job's by now, so they are never fallen back to.
    """
    again = before is not None and before.decision == allocation.decision
    kept = {
        key: min(gpus, worked[key]) for key, gpus in allocation.placement.items() if worked.get(key, 0) > 0
    }
    enough = spec.min_gpus <= sum(kept.values()) < allocation.num_gpus and not (
        again and before and dict(before.placement) == kept and not before.over
    )
    first_s = FIRST_PAUSE_S if enough else EMPTY_PAUSE_S
    pause_s = min(2 * before.pause_s, MAX_PAUSE_S) if again and before else first_s
    return Narrowed(
        decision=allocation.decision,
        placement=kept if enough else {},
        reason=reason,
        pause_s=pause_s,
        until_unix_s=now_unix_s + pause_s,
    )
