"""What happens right now, read from the cluster, the workers' event files and the last decision."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pollux.cluster.base import ClusterJob, JobIdentity, Phase
from pollux.cluster.identity import job_id
from pollux.demo.jobs import TASK, TRAIN_DAG, DemoJob
from pollux.demo.site import JobLook
from pollux.errors import UnknownJob
from pollux.record import Records
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Event, JobFolder, Placement, decode

_TAIL_BYTES = 16_384
_WINDOW_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job as it is now. ``goodput`` is measured: useful samples per second over the last steps.

    ``progress`` was made in the ``trained_s`` seconds since its first start.
    """

    name: str
    phase: Phase | None = None
    placement: Placement = field(default_factory=dict)
    incarnation: int = 0
    step: int = 0
    progress: float = 0.0
    trained_s: float = 0.0
    batch_size: int = 0
    goodput: float | None = None
    message: str = ""

    @property
    def gpus(self) -> int:
        return sum(self.placement.values())

    @property
    def is_at_work(self) -> bool:
        """Whether it trains at this moment."""
        return self.phase == "running" and self.step > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNow:
    """All jobs of the demo, and what the last decision said of each."""

    jobs: tuple[JobView, ...]
    decision: int = 0
    reasons: tuple[tuple[str, str], ...] = ()

    @property
    def gpus_at_work(self) -> int:
        """GPUs of the jobs that train at this moment."""
        return sum(job.gpus for job in self.jobs if job.is_at_work)


class Observer:
    """Reads the state of the demo's jobs; a job that was not submitted yet has no phase."""

    def __init__(self, control: JobLook, state: Path, *, deployment: str = "airflow") -> None:
        self._control, self._state, self._deployment = control, state, deployment
        self._decisions = Records(state / "decisions")

    def look(self, jobs: Sequence[DemoJob]) -> ClusterNow:
        """Raises ClusterUnavailable when the cluster does not answer."""
        decision = self._decisions.newest_decision()
        views = tuple(self._view(job) for job in jobs)
        if decision is None:
            return ClusterNow(jobs=views)
        names = {self.job_id(job): job.name for job in jobs}
        reasons = tuple((names[key], said.reason) for key, said in decision.jobs.items() if key in names)
        return ClusterNow(jobs=views, decision=decision.decision, reasons=reasons)

    def job_id(self, job: DemoJob) -> str:
        identity = JobIdentity(deployment=self._deployment, dag_id=TRAIN_DAG, run_id=job.run_id, task_id=TASK)
        return job_id(identity, job.name)

    def _view(self, job: DemoJob) -> JobView:
        try:
            found: ClusterJob = self._control.job(self.job_id(job))
        except UnknownJob:
            return JobView(name=job.name)
        folder = JobFolder(self._state / "jobs" / found.job_id)
        events = newest_events(folder, found.status.incarnation)
        last = events[-1] if events else None
        return JobView(
            name=job.name,
            phase=found.status.phase,
            placement=found.status.held,
            incarnation=found.status.incarnation,
            step=last.step if last else 0,
            progress=last.progress if last else 0.0,
            trained_s=trained_s(folder, last) if last else 0.0,
            batch_size=batch_size(events),
            goodput=measured_goodput(events, initial_batch_size=job.initial_batch_size),
            message=found.status.message,
        )


def newest_events(folder: JobFolder, incarnation: int) -> list[Event]:
    """Rank 0's last events, those of an earlier incarnation while this one has not trained yet."""
    for number in range(incarnation, 0, -1):
        events = last_events(folder.events(number, 0))
        if events and events[-1].event != "start":
            return events
    return []


def trained_s(folder: JobFolder, last: Event) -> float:
    """Seconds from rank 0's first start to its ``last`` event; 0 where no file tells."""
    try:
        with folder.events(1, 0).open("rb") as file:
            return last.t_unix_s - decode(Event, file.readline()).t_unix_s
    except (OSError, DocumentError):
        return 0.0


def last_events(path: Path) -> list[Event]:
    """The whole lines at the end of an event file; none while it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            start = max(0, file.tell() - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    events = []
    for line in lines[1 if start else 0 : -1]:
        try:
            events.append(decode(Event, line))
        except DocumentError:
            continue
    return events


def batch_size(events: Sequence[Event]) -> int:
    """The batch size of the newest steps; 0 without any. The last step of a pass may be shorter."""
    steps = [event for event in events if event.event == "step"]
    return max((event.batch_size for event in steps[-2:]), default=0)


def measured_goodput(events: Sequence[Event], *, initial_batch_size: int) -> float | None:
    """Useful samples per second over the last steps; None while there are too few."""
    steps = [event for event in events if event.event == "step"]
    steps = [event for event in steps if event.t_unix_s >= steps[-1].t_unix_s - _WINDOW_S]
    if len(steps) < 2 or steps[-1].t_unix_s <= steps[0].t_unix_s:
        return None
    seconds = steps[-1].t_unix_s - steps[0].t_unix_s
    return (steps[-1].progress - steps[0].progress) * initial_batch_size / seconds
