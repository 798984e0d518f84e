"""Where a job's files lie: one folder a job, the same for the worker that writes and the reader that checks.

::

    jobs/<job_id>/
        spec.json                           the JobSpec
        driver.jsonl                        DriverEvents
        events-<incarnation>-<rank>.jsonl   Events of one rank
        outcomes/<incarnation>-<rank>.json  the Outcome of one rank
        checkpoints/                        see pollux_agent.torch.checkpoint
        logged.json                         the last step that each metric was logged at, as lines of JSON
        unsent.json                         figures that MLflow did not take before the workers ended
        last-stop.json                      when the last stop on request began and ended its save
        unsaved.json                        why no checkpoint can be written, while none can: Unsaved
        complete.json                       completion marker: the Outcome of rank 0, kind done
        logs/<incarnation>-<node>.log       what the workers on that node printed
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class JobFolder:
    """Paths inside one job's folder; nothing is created by asking for a path."""

    root: Path

    @property
    def spec(self) -> Path:
        return self.root / "spec.json"

    @property
    def driver_events(self) -> Path:
        return self.root / "driver.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def complete(self) -> Path:
        return self.root / "complete.json"

    @property
    def unsaved(self) -> Path:
        return self.root / "unsaved.json"

    @property
    def logged(self) -> Path:
        return self.root / "logged.json"

    @property
    def unsent(self) -> Path:
        return self.root / "unsent.json"

    @property
    def last_stop(self) -> Path:
        return self.root / "last-stop.json"

    @property
    def outcomes(self) -> Path:
        return self.root / "outcomes"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def events(self, incarnation: int, rank: int) -> Path:
        return self.root / f"events-{incarnation}-{rank}.jsonl"

    def outcome(self, incarnation: int, rank: int) -> Path:
        return self.outcomes / f"{incarnation}-{rank}.json"

    def log(self, incarnation: int, node: str) -> Path:
        return self.logs / f"{incarnation}-{node}.log"
