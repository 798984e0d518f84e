"""Submits the demo's jobs one after another through Airflow, and follows them to their end."""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pollux.airflow_api import AirflowApi
from pollux.demo.jobs import (
    SCHEDULE_DAG,
    TASK,
    TRAIN_DAG,
    DemoJob,
    DemoPlan,
    JobSize,
    growth_of,
    size_jobs,
)
from pollux.demo.observe import ClusterNow, JobView, Observer
from pollux.demo.sizing import Timing, speed_seen
from pollux.errors import AirflowApiError, AirflowUnavailable, ClusterUnavailable, DemoError

POLL_S = 1.0
_LOG_LINES = 12


class Watchdog:
    """Notices when nothing at all has changed for too long."""

    def __init__(self, phase: str, *, stall_s: float, where: Path) -> None:
        self._phase, self._stall_s, self._where = phase, stall_s, where
        self._seen: Hashable = None
        self._since_s: float | None = None

    def feed(self, seen: Hashable, now_s: float) -> None:
        """``seen`` is whatever changes with progress.

        Raises DemoError naming the phase and the folder of logs once it has been the same for ``stall_s``.
        """
        if self._since_s is None or seen != self._seen:
            self._seen, self._since_s = seen, now_s
        elif now_s - self._since_s >= self._stall_s:
            raise DemoError(
                f"while {self._phase}: no progress for {self._stall_s:.0f} s; read the logs in {self._where}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """What the live view shows: ``runs`` are Airflow's states by job name, for the submitted jobs."""

    elapsed_s: float
    now: ClusterNow
    runs: Mapping[str, str]
    targets: Mapping[str, float]


def is_due(plan: DemoPlan, now: ClusterNow, *, since_last_s: float, capacity: int) -> bool:
    """Whether to submit the next job: every slot and job is at work, no job is left, or patience ended."""
    active = [job for job in now.jobs if job.phase not in (None, "done")]
    full = all(job.is_at_work for job in active) and now.gpus_at_work >= capacity
    return full or not active or since_last_s >= plan.patience_s


def await_dags(api: AirflowApi, *, stall_s: float, logs: Path) -> None:
    """Wait until Airflow has read both DAGs.

    Raises DemoError with Airflow's own words where a DAG file is broken.
    """
    watchdog = Watchdog("waiting for Airflow to read the DAGs", stall_s=stall_s, where=logs)
    while True:
        found = [api.dag(dag) for dag in (TRAIN_DAG, SCHEDULE_DAG)]
        if all(dag is not None for dag in found):
            return
        for name, trace in api.import_errors().items():
            raise DemoError(f"Airflow cannot read {name}:\n{trace}")
        watchdog.feed(tuple(dag is None for dag in found), time.monotonic())
        time.sleep(POLL_S)


class Follower:
    """One training phase, over the jobs of a plan.

    ``sizes`` are by name and ``timings`` by script. When the second job is due, the first one has shown how
    fast scripts really train here, by which the sizes of all that follow are corrected.
    """

    def __init__(
        self,
        plan: DemoPlan,
        api: AirflowApi,
        observer: Observer,
        *,
        sizes: Mapping[str, JobSize],
        timings: Mapping[str, Timing],
        state: Path,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._api, self._observer = plan, api, observer
        self.sizes, self._timings = dict(sizes), timings
        self._state, self._say = state, say
        self._capacity = plan.nodes.num_slots
        self._runs: dict[str, str] = {}
        self._submitted_s = 0.0

    def run(self, show: Callable[[Watching], None]) -> None:
        """Return when every job has succeeded in Airflow; raises DemoError when one has not."""
        watchdog = Watchdog("training", stall_s=self._plan.stall_s, where=self._state / "logs")
        began_s = time.monotonic()
        now = ClusterNow(jobs=())
        while True:
            try:
                now = self._observer.look(self._plan.jobs)
                self._ask_airflow()
                self._submit_next(now)
            except (ClusterUnavailable, AirflowUnavailable):
                watchdog.feed("unavailable", time.monotonic())
                time.sleep(POLL_S)
                continue
            elapsed_s = time.monotonic() - began_s
            targets = {name: size.target_progress for name, size in self.sizes.items()}
            show(Watching(elapsed_s=elapsed_s, now=now, runs=dict(self._runs), targets=targets))
            self._check_failed(now)
            if len(self._runs) == len(self._plan.jobs) and set(self._runs.values()) == {"success"}:
                return
            signs = tuple((job.phase, job.step, job.incarnation) for job in now.jobs)
            watchdog.feed((signs, tuple(self._runs.items())), time.monotonic())
            time.sleep(POLL_S)

    def _submit_next(self, now: ClusterNow) -> None:
        if len(self._runs) == len(self._plan.jobs):
            return
        since_s = time.monotonic() - self._submitted_s
        known = sum(job.phase is not None for job in now.jobs)
        due = is_due(self._plan, now, since_last_s=since_s, capacity=self._capacity)
        if self._runs and not (due and known == len(self._runs)):
            return
        if len(self._runs) == 1:
            self._correct_sizes(now.jobs[0])
        job = self._plan.jobs[len(self._runs)]
        form = job.form(epochs=self.sizes[job.name].epochs, max_gpus=self._capacity)
        run = self._api.trigger(TRAIN_DAG, form, run_id=job.run_id, exist_ok=True)
        self._runs[job.name] = run.state
        self._submitted_s = time.monotonic()

    def _correct_sizes(self, first: JobView) -> None:
        """Of the jobs behind the first one, which has had the cluster to itself so far."""
        plan, timing = self._plan, self._timings[self._plan.jobs[0].script]
        faster = speed_seen(timing, growth_of(plan, timing), progress=first.progress, seconds=first.trained_s)
        self.sizes |= size_jobs(replace(plan, jobs=plan.jobs[1:]), self._timings, faster=faster)
        told = ", ".join(f"{job.name} {self.sizes[job.name].epochs} epochs" for job in plan.jobs[1:])
        self._say(f"{first.name} trains {faster:.2f} x as fast as it was timed, so: {told}")

    def _ask_airflow(self) -> None:
        for job in self._plan.jobs[: len(self._runs)]:
            if self._runs[job.name] not in ("success", "failed"):
                self._runs[job.name] = self._api.dag_run(TRAIN_DAG, job.run_id).state

    def _check_failed(self, now: ClusterNow) -> None:
        for job, view in zip(self._plan.jobs, now.jobs, strict=True):
            if self._runs.get(job.name) == "failed":
                raise DemoError(self._why_failed(job, view))

    def _why_failed(self, job: DemoJob, view: JobView) -> str:
        """The end of the task's own log, and where the rest is."""
        try:
            task = self._api.task_instance(TRAIN_DAG, job.run_id, TASK)
            tries = task.try_number if task else 1
            lines = self._api.log(TRAIN_DAG, job.run_id, TASK, try_number=tries).splitlines()[-_LOG_LINES:]
        except AirflowApiError:
            lines = []
        logs = self._state / "jobs" / self._observer.job_id(job) / "logs"
        return "\n".join([f"job {job.name} failed in Airflow: {view.message}", *lines, f"all of it: {logs}"])
