"""Airflow and MLflow on this machine, with Kubernetes as their cluster; and trainings seen from all sides."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kube_nodes import TestKube, host_pod

from pollux.airflow_api import AirflowApi, DagRun, TaskInstance
from pollux.cluster.base import FINAL_PHASES, ClusterJob
from pollux.cluster.k8s import KubeCluster, KubeSettings
from pollux.stack.control import running_stack
from pollux.stack.record import StackPlan
from pollux_agent.protocol import DriverEvent, JobFolder, decode

DAG = "pollux_train"
INTERVAL_S = 10.0
WAIT_S = 180.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeStack:
    """A running stack whose jobs go to ``cluster``; ``jobs`` is the folder behind their volume."""

    api: AirflowApi
    cluster: KubeCluster
    kube: TestKube
    namespace: str
    jobs: Path
    mlflow_url: str

    def train(self, **conf: Any) -> "KubeTraining":
        return KubeTraining(self, self.api.trigger(DAG, conf))


@contextmanager
def kube_stack(kube: TestKube, namespace: str, folder: Path) -> Iterator[KubeStack]:
    """The stack under a scheduler's settings for that namespace."""
    jobs = folder / "jobs"
    jobs.mkdir()
    settings = kube.settings(namespace, jobs, lost_after_s=5.0)
    template = folder / "pod.json"
    template.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", **host_pod()}))
    plan = StackPlan(state=folder / "state", interval_s=INTERVAL_S)
    with _environment(settings, template):
        with running_stack(plan) as record:
            with AirflowApi.from_login(record.airflow_url, record.login) as api:
                yield KubeStack(
                    api=api,
                    cluster=KubeCluster(kube.api, settings, namespace=namespace),
                    kube=kube,
                    namespace=namespace,
                    jobs=jobs,
                    mlflow_url=record.mlflow_url,
                )


@contextmanager
def _environment(settings: KubeSettings, template: Path) -> Iterator[None]:
    """The settings as variables; the stack passes them on to its services."""
    given = {"POLLUX_CLUSTER": "kubernetes", "POLLUX_KUBE_POD_TEMPLATE": str(template)}
    for field in ("config", "namespace", "driver_service_account", "python", "grace_s", "lost_after_s"):
        given[f"POLLUX_KUBE_{field.upper()}"] = str(getattr(settings, field))
    for field in ("report_interval_s", "checkpoint_interval_s", "place_wait_s"):
        given[f"POLLUX_KUBE_{field.upper()}"] = str(getattr(settings, field))
    for field in ("jobs_volume", "driver_env"):
        given[f"POLLUX_KUBE_{field.upper()}"] = json.dumps(getattr(settings, field))
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@dataclass(frozen=True, slots=True)
class KubeTraining:
    """One run of the training DAG."""

    stack: KubeStack
    run: DagRun

    @property
    def task(self) -> TaskInstance:
        return self.stack.api.task_instances(DAG, self.run.run_id)[0]

    @property
    def job(self) -> ClusterJob | None:
        found = (job for job in self.stack.cluster.every_job().jobs if job.identity.run_id == self.run.run_id)
        return next(found, None)

    def log(self, try_number: int = 1) -> str:
        return self.stack.api.log(DAG, self.run.run_id, "train", try_number=try_number)

    def sizes(self, job_id: str) -> list[int]:
        """GPU counts of its starts, in order, as its driver wrote them down."""
        lines = JobFolder(self.stack.jobs / job_id).driver_events.read_bytes().splitlines()
        events = [decode(DriverEvent, line) for line in lines]
        return [sum(event.placement.values()) for event in events if event.event == "start"]

    def wait(
        self, holds: Callable[[ClusterJob | None, TaskInstance], Any], what: str, timeout_s: float = WAIT_S
    ) -> ClusterJob:
        deadline = time.monotonic() + timeout_s
        while not holds(job := self.job, task := self.task):
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{what}: not within {timeout_s:.0f} s; last: {job}, {task}\n{self.log()[-3000:]}"
                )
            time.sleep(_POLL_S)
        return job  # type: ignore[return-value]

    def runs_on(self, gpus: int) -> Callable[[ClusterJob | None, TaskInstance], bool]:
        return lambda job, task: (
            job is not None
            and job.status.phase == "running"
            and sum(job.status.held.values()) == gpus == job.allocation.num_gpus
        )

    def abandon(self) -> None:
        """End it, if it has not ended."""
        if (job := self.job) is not None and job.status.phase not in FINAL_PHASES:
            self.stack.cluster.stop(job.job_id, "failed")
