"""What a job has behind it, over all its incarnations."""

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pollux_agent.model.goodput import BatchLimits


@dataclass(slots=True, kw_only=True)
class History:
    """Counters that survive a restart with the checkpoint.

    ``progress`` counts steps of size M0 in useful progress; ``logged`` is the last step that each
    metric was logged at; ``restart_s`` sums the seconds from stop signal to first new step over
    ``timed_restarts`` restarts (one after a crash has no signal to time from). ``trusted_batch_size`` is the
    largest batch whose training was seen to follow its progress, ``held_batch_size`` the one not to pass any
    more; both 0 where nobody watches (pollux_agent.torch.watch). ``idle_steps``, ``idle_examples`` are those
    since the last update. ``max_gpus_seen`` and, by GPU type, ``gpus_seen`` are the largest numbers of GPUs
    that were measured, in an earlier run of the model as well.
    """

    step: int = 0
    progress: float = 0.0
    examples: int = 0
    skipped_steps: int = 0
    idle_steps: int = 0
    idle_examples: int = 0
    restarts: int = 0
    timed_restarts: int = 0
    restart_s: float = 0.0
    first_start_s: float | None = None
    max_gpus_seen: int = 0
    gpus_seen: dict[str, int] = field(default_factory=dict)
    max_batch_size_seen: int = 0
    trusted_batch_size: int = 0
    held_batch_size: int = 0
    reports: int = 0
    logged: dict[str, int] = field(default_factory=dict)

    @property
    def mean_restart_s(self) -> float | None:
        return self.restart_s / self.timed_restarts if self.timed_restarts else None

    def batch_size_limit(self, limits: BatchLimits) -> int:
        """The largest total batch that may be chosen: the job's own limit, or what the watch holds it to."""
        if not self.held_batch_size:
            return limits.max_batch_size
        return max(limits.initial_batch_size, min(limits.max_batch_size, self.held_batch_size))

    def measured(self, gpu_type: str, num_gpus: int) -> None:
        """Steps on so many GPUs of that type are behind what its fit says."""
        self.gpus_seen[gpu_type] = max(self.gpus_seen.get(gpu_type, 0), num_gpus)
        self.max_gpus_seen = max(self.max_gpus_seen, num_gpus)

    def count_restart(self, seconds: float | None) -> None:
        """A restarted job made its first new step, ``seconds`` after the stop signal if there was one."""
        self.restarts += 1
        if seconds is not None:
            self.timed_restarts += 1
            self.restart_s += max(0.0, seconds)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, state.get(name, getattr(self, name)))


def process_age_s() -> float | None:
    """Seconds since this process began, None where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
