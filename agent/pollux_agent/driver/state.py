"""What a driver knows of its job: a document, so that a new driver goes on where a dead one stopped."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux_agent.protocol import DOCUMENT_CONFIG, DecisionNumber, Outcome, Placement

Phase = Literal["waiting", "starting", "running", "stopping", "done", "failed", "ended"]
StopReason = Literal["failed", "success", "clear", "orphan"]

Count = Annotated[int, Field(ge=0, le=2**53, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=1e18)]

_MOST_UNCOUNTED_S = 300.0
"""A driver counts every few seconds, and tells its cluster every minute."""


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class DriverState:
    """One job's driver between two turns.

    ``placement`` is where the workers are now, empty without any; ``attained_gpu_s`` counts their GPU seconds
    up to ``counted_unix_s``. ``signal_unix_s`` is when the present or
    last workers were asked to stop or broke down, and ``downtime_s`` what had passed since then when they
    were gone and the job had to wait for GPUs, so that waiting does not count as restarting.
    ``broken_unix_s`` is when the gang was first seen incomplete, ``kill_unix_s`` when patience ends.
    ``fruitless_starts`` counts starts in a row that reached no step above ``best_step``. ``failure`` is the
    last failure, kept across a new submission to know it again; ``outcome`` is how the job ended.
    """

    schema: Literal[1] = 1
    phase: Phase = "waiting"
    since_unix_s: float = 0.0
    message: str = ""
    incarnation: Count = 0
    placement: Placement = Field(default_factory=dict)
    acted_decision: DecisionNumber = 0
    counted_unix_s: float | None = None
    signal_unix_s: float | None = None
    downtime_s: Seconds | None = None
    broken_unix_s: float | None = None
    kill_unix_s: float | None = None
    killed: bool = False
    retry_unix_s: float = 0.0
    fruitless_starts: Count = 0
    best_step: Count = 0
    max_gpus_seen: Count = 0
    attained_gpu_s: Seconds = 0.0
    failure: Outcome | None = None
    outcome: Outcome | None = None
    final: bool = False

    @property
    def num_gpus(self) -> int:
        """GPUs that the workers occupy now."""
        return sum(self.placement.values())

    def attained(self, now_unix_s: float) -> float:
        """GPU seconds that the job has had so far; a clock that jumped counts as five minutes at most."""
        if self.counted_unix_s is None:
            return self.attained_gpu_s
        running_s = min(max(0.0, now_unix_s - self.counted_unix_s), _MOST_UNCOUNTED_S)
        return self.attained_gpu_s + self.num_gpus * running_s
