"""Airflow and MLflow on this machine, with Kubernetes as their cluster; and trainings seen from all sides.

Airflow acts with the rights of the ServiceAccount that the chart gives it, drivers with those of theirs.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helm_runs import CHART, account_kubeconfig, run_tool
from kube_nodes import TOP, TestKube, awaited, has_token, host_pod

from pollux.airflow_api import AirflowApi, DagRun, TaskInstance
from pollux.cluster.base import FINAL_PHASES, ClusterJob
from pollux.cluster.k8s import KubeCluster, KubeSettings
from pollux.stack.control import running_stack
from pollux.stack.record import StackPlan
from pollux_agent.driver.kube.api import pod_path
from pollux_agent.protocol import DriverEvent, Event, JobFolder, decode

DAG = "pollux_train"
SYNC_DAG = "train_in_the_task"
RELEASE = "pollux-test-airflow"
"""The namespace of the chart's release and of Airflow's own account, and that account."""
INTERVAL_S = 10.0
WAIT_S = 240.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeStack:
    """A running stack whose jobs go to ``cluster``. ``jobs`` is the folder behind their volume; ``config`` is
    the kubeconfig of Airflow's account.
    """

    api: AirflowApi
    cluster: KubeCluster
    kube: TestKube
    namespace: str
    state: Path
    jobs: Path
    config: Path
    mlflow_url: str

    def train(self, dag: str = DAG, **conf: Any) -> "KubeTraining":
        return KubeTraining(self, dag, self.api.trigger(dag, conf))

    def driver_node(self, job_id: str) -> str:
        found = self.kube.api.get(pod_path(self.namespace, job_id))
        return str(found["spec"]["nodeName"])


@contextmanager
def kube_stack(kube: TestKube, namespace: str, folder: Path) -> Iterator[KubeStack]:
    """The stack under a scheduler's settings for that namespace, which is made with the chart's rights."""
    jobs = folder / "jobs"
    jobs.mkdir()
    config = _install(kube, namespace, folder)
    settings = kube.settings(namespace, jobs, lost_after_s=5.0, config=config, lease_namespace=RELEASE)
    template = folder / "pod.json"
    template.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", **host_pod()}))
    plan = StackPlan(state=folder / "state", interval_s=INTERVAL_S, dags=_dags(folder))
    with _environment(settings, template):
        with running_stack(plan) as record:
            with AirflowApi.from_login(record.airflow_url, record.login) as api:
                yield KubeStack(
                    api=api,
                    cluster=KubeCluster(kube.api, settings, namespace=namespace),
                    kube=kube,
                    namespace=namespace,
                    state=plan.state,
                    jobs=jobs,
                    config=config,
                    mlflow_url=record.mlflow_url,
                )


def _install(kube: TestKube, namespace: str, folder: Path) -> Path:
    """Install the chart for jobs in ``namespace``; the kubeconfig of Airflow's account."""
    api = kube.api
    for name in (RELEASE, namespace):
        kube.bare_namespace(name)
    api.create(f"/api/v1/namespaces/{RELEASE}/serviceaccounts", {"metadata": {"name": RELEASE}})
    values = {
        "namespaces": [namespace],
        "airflow": {"serviceAccounts": [{"name": RELEASE, "namespace": RELEASE}]},
        "checkpoints": {"volume": {"hostPath": {"path": str(folder / "jobs")}}},
    }
    run_tool(
        "helm", "install", "pollux", str(CHART), "--namespace", RELEASE, "--values", "-",
        kubeconfig=kube.kubeconfig, stdin=json.dumps(values),
    )  # fmt: skip
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    for account in ("default", "pollux-driver"):
        awaited(lambda account=account: has_token(api, f"{accounts}/{account}"))
    return account_kubeconfig(kube.kubeconfig, RELEASE, RELEASE, folder / "kubeconfig")


def _dags(folder: Path) -> Path:
    """The project's DAGs, and one whose task waits for its job in its own process."""
    dags = folder / "dags"
    shutil.copytree(TOP / "dags", dags, ignore=shutil.ignore_patterns("__pycache__"))
    text = (dags / "pollux_train.py").read_text()
    changed = text.replace(f'"{DAG}"', f'"{SYNC_DAG}"').replace("spec=spec", "deferrable=False, spec=spec")
    assert changed.count("deferrable=False") == 1 == changed.count(SYNC_DAG)
    (dags / f"{SYNC_DAG}.py").write_text(changed)
    return dags


@contextmanager
def _environment(settings: KubeSettings, template: Path) -> Iterator[None]:
    """The settings as variables; the stack passes them on to its services."""
    given = {"POLLUX_CLUSTER": "kubernetes", "POLLUX_KUBE_POD_TEMPLATE": str(template)}
    for field in ("config", "namespace", "lease_namespace", "driver_service_account", "python"):
        given[f"POLLUX_KUBE_{field.upper()}"] = str(getattr(settings, field))
    for field in ("grace_s", "lost_after_s", "report_interval_s", "checkpoint_interval_s", "place_wait_s"):
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
    dag: str
    run: DagRun

    @property
    def task(self) -> TaskInstance:
        return self.stack.api.task_instances(self.dag, self.run.run_id)[0]

    @property
    def job(self) -> ClusterJob | None:
        found = (job for job in self.stack.cluster.every_job().jobs if job.identity.run_id == self.run.run_id)
        return next(found, None)

    def log(self, try_number: int = 1) -> str:
        return self.stack.api.log(self.dag, self.run.run_id, "train", try_number=try_number)

    def sizes(self, job_id: str) -> list[int]:
        """GPU counts of its starts, in order, as its driver wrote them down."""
        lines = JobFolder(self.stack.jobs / job_id).driver_events.read_bytes().splitlines()
        events = [decode(DriverEvent, line) for line in lines]
        return [sum(event.placement.values()) for event in events if event.event == "start"]

    def events(self, job_id: str, incarnation: int) -> list[Event]:
        """What rank 0 of an incarnation wrote down."""
        lines = JobFolder(self.stack.jobs / job_id).events(incarnation, 0).read_bytes().splitlines()
        return [decode(Event, line) for line in lines]

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
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)
        return job  # type: ignore[return-value]

    @property
    def is_running(self) -> bool:
        job = self.job
        return job is not None and job.status.phase == "running"

    def set_state(self, state: str) -> None:
        self.stack.api.set_state(self.dag, self.run.run_id, "train", state)

    def clear(self) -> None:
        """Clear its task once its run is over: Airflow forgets a clear that comes just as it ends the run."""
        awaited(lambda: self.stack.api.dag_run(self.dag, self.run.run_id).is_final, timeout_s=WAIT_S)
        self.stack.api.clear(self.dag, self.run.run_id, ["train"])

    def end_process(self, how: signal.Signals = signal.SIGTERM) -> None:
        """A signal to the process of its task."""
        path = f"/dags/{self.dag}/dagRuns/{self.run.run_id}/taskInstances/train"
        os.kill(int(self.stack.api.get(path)["pid"]), how)

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
