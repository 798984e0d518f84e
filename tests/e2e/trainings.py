"""Runs of the training DAG, seen from Airflow, from the cluster and from the files that they leave."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pollux.airflow_api import DagRun, TaskInstance
from pollux.cluster.base import FINAL_PHASES, ClusterJob
from pollux.cluster.local import LocalCluster
from pollux.stack.processes import wait_until
from pollux.verify import JobRecord, read_record
from pollux_agent.protocol import Event, JobFolder, decode

WAIT_S = 90.0
POLL_S = 0.3
DAG = "pollux_train"
STEADY = Path(__file__).with_name("steady_training.py")

_STEP_LINE = re.compile(r"\[(\d+)/node-\d+\] step (\d+)$", re.MULTILINE)


class Training:
    """One run of the training DAG."""

    def __init__(self, stack: Any, **conf: Any) -> None:
        self.state: Path = stack.state
        self.api = stack.api
        self.cluster = LocalCluster(stack.state / "local.sock")
        self.run: DagRun = self.api.trigger(DAG, conf)

    @property
    def task(self) -> TaskInstance:
        return self.api.task_instances(DAG, self.run.run_id)[0]

    @property
    def job(self) -> ClusterJob | None:
        jobs = [job for job in self.cluster.every_job().jobs if job.identity.run_id == self.run.run_id]
        return jobs[0] if jobs else None

    def log(self, try_number: int = 1) -> str:
        return self.api.log(DAG, self.run.run_id, "train", try_number=try_number)

    def printed(self, try_number: int = 1) -> list[tuple[int, int]]:
        """(incarnation, step) of each step that a steady training printed, as the task's log page has it."""
        found = _STEP_LINE.findall(self.log(try_number))
        return [(int(incarnation), int(step)) for incarnation, step in found]

    @property
    def record(self) -> JobRecord:
        """What its workers and its driver wrote down so far."""
        return next(
            record for record in read_record(self.state).jobs if record.job.identity.run_id == self.run.run_id
        )

    def steps_of(self, event: str, incarnation: int) -> list[int]:
        """Steps at which rank 0 of an incarnation wrote that event, as far as its file is whole."""
        job = self.job
        if job is None:
            return []
        try:
            lines = JobFolder(self.state / "jobs" / job.job_id).events(incarnation, 0).read_bytes()
        except FileNotFoundError:
            return []
        whole = lines.splitlines()[: lines.count(b"\n")]
        return [seen.step for line in whole if (seen := decode(Event, line)).event == event]

    def wait(
        self, holds: Callable[[ClusterJob | None, TaskInstance], bool], what: str, timeout_s: float = WAIT_S
    ) -> ClusterJob:
        deadline = time.monotonic() + timeout_s
        while not holds(job := self.job, task := self.task):
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s; last: {job}, {task}"
            time.sleep(POLL_S)
        return job

    def wait_for_checkpoint(self, incarnation: int) -> ClusterJob:
        """Until that incarnation has written a checkpoint of its own, on its way."""
        return self.wait(
            lambda job, task: (
                job is not None
                and job.status.phase == "running"
                and bool(self.steps_of("checkpoint", incarnation))
            ),
            f"incarnation {incarnation} writes a checkpoint",
        )

    def succeeds(self) -> ClusterJob:
        return self.wait(lambda job, task: task.state == "success", "its task succeeds")

    def clear(self) -> None:
        """Clear its task once its run is over: Airflow forgets a clear that comes just as it ends the run."""
        assert wait_until(lambda: self.api.dag_run(DAG, self.run.run_id).is_final, WAIT_S)
        self.api.clear(DAG, self.run.run_id, ["train"])

    def abandon(self) -> None:
        """End it, if it has not ended."""
        if (job := self.job) is not None and job.status.phase not in FINAL_PHASES:
            self.cluster.stop(job.job_id, "failed")


def steady(stack: Any, name: str, *arguments: str, gpus: int = 1) -> Training:
    """A steady training of ``gpus`` GPUs; see ``steady_training.py`` for its arguments."""
    return Training(
        stack,
        name=name,
        script=str(STEADY),
        arguments=list(arguments),
        kind="rigid",
        scaling_rule="none",
        initial_batch_size=8,
        max_local_batch_size=8,
        min_gpus=gpus,
        max_gpus=gpus,
    )
