"""A steady training that a test drives by hand, as a scheduler would, and pods of somebody else."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

from kube_nodes import GPU, TOP, TestKube, awaited, host_pod

from pollux.cluster.base import ClusterJob, JobIdentity
from pollux.cluster.k8s import KubeCluster, KubeSettings
from pollux.errors import UnknownJob
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import KubeError, pod_path
from pollux_agent.protocol import Allocation, Event, JobFolder, JobSpec, decode, encode

STEADY = TOP / "tests/e2e/steady_training.py"
LEASE = timedelta(seconds=30)
_GIVING = threading.Lock()
"""Tests that go on at the same time take turns, as scheduling tasks do."""


class SteadyJob:
    """One steady training, driven by hand as a scheduler would."""

    def __init__(
        self, cluster: KubeCluster, space: str, *, deployment: str = "airflow", **fields: Any
    ) -> None:
        self.cluster = cluster
        self.space = space
        self.deployment = deployment
        self.id = f"job-{uuid4().hex[:8]}"
        self.spec = JobSpec(
            **{
                "name": "steady",
                "script": str(STEADY),
                "kind": "strong_scaling",
                "scaling_rule": "none",
                "initial_batch_size": 8,
                "max_local_batch_size": 8,
                "max_gpus": 8,
            }
            | fields
        )
        self.submit()

    def submit(self) -> ClusterJob:
        identity = JobIdentity(deployment=self.deployment, dag_id="train", run_id=self.id, task_id="train")
        return self.cluster.submit(self.id, identity=identity, spec=self.spec, run_id=None)

    @property
    def now(self) -> ClusterJob:
        return self.cluster.job(self.id)

    def give(self, placement: dict[str, int]) -> int:
        with _GIVING, self.cluster.lease("test", LEASE):
            number = self.cluster.next_decision()
            self.cluster.observe()
            self.cluster.patch_allocation(
                self.id,
                expected=self.now.allocation.decision,
                allocation=Allocation(decision=number, placement=placement, gpu_type="gpu", reason="test"),
            )
        return number

    def force(self, placement: dict[str, int]) -> int:
        """Allocate without looking whether the GPUs are there, as if they were taken only just now."""
        number = self.cluster.next_decision()
        allocation = Allocation(decision=number, placement=placement, gpu_type="gpu", reason="test")
        notes = {doc.DECISION: str(number), doc.ALLOCATION: encode(allocation)}
        self.cluster.api.patch(pod_path(self.space, self.id), {"metadata": {"annotations": notes}})
        return number

    def runs_on(self, placement: dict[str, int], timeout_s: float = 240.0, above: int = 0) -> ClusterJob:
        """Until its workers train there, in an incarnation above ``above``."""
        return awaited(
            lambda: self.now,
            lambda job: (
                job.status.phase == "running"
                and dict(job.status.held) == placement
                and job.status.incarnation > above
            ),
            timeout_s,
        )

    def pods(self) -> list[dict[str, Any]]:
        selector = f"{doc.JOB}={self.id},{doc.ROLE}={doc.WORKER_ROLE}"
        found = self.cluster.api.items(pod_path(self.space), labelSelector=selector)
        return [pod for pod in found if not doc.is_terminal(pod)]

    def sizes(self) -> dict[str, int]:
        """GPUs that each node gives, as a scheduler sees it."""
        return {node.name: node.gpus for node in self.cluster.observe().nodes}

    def ask_to_end(self) -> None:
        with suppress(UnknownJob):
            self.cluster.stop(self.id, "failed")

    def end(self) -> None:
        self.ask_to_end()
        try:
            awaited(lambda: self.now.status.phase, lambda phase: phase in ("ended", "failed", "done"), 60)
            self.cluster.remove(self.id)
        except UnknownJob:
            return


Start = Callable[..., SteadyJob]


@contextmanager
def starting(kube: TestKube, settings: KubeSettings) -> Iterator[Start]:
    """Starts steady jobs, of the pod and with the driver's variables that it is given, and ends them."""
    started: list[SteadyJob] = []
    space = settings.namespace

    def start(
        pod: dict[str, Any] | None = None, driver_env: Mapping[str, str] | None = None, **fields: Any
    ) -> SteadyJob:
        own = replace(settings, driver_env={**settings.driver_env, **(driver_env or {})})
        made = pod if pod is not None else host_pod()
        cluster = KubeCluster(kube.api, own, namespace=space, user_pod=lambda: made)
        started.append(SteadyJob(cluster, space, **fields))
        return started[-1]

    try:
        yield start
    finally:
        for job in started:
            job.ask_to_end()
        for job in started:
            job.end()


def events_of(folder: JobFolder, incarnation: int) -> list[Event]:
    """What rank 0 of an incarnation wrote down; the line that it was killed at is left out."""
    try:
        lines = folder.events(incarnation, 0).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [decode(Event, line) for line in lines if line.endswith(b"\n")]


def steps_of(folder: JobFolder, event: str, incarnation: int) -> list[int]:
    """Steps at which rank 0 of an incarnation wrote that event."""
    return [seen.step for seen in events_of(folder, incarnation) if seen.event == event]


def check_resumes(folder: JobFolder) -> int:
    """Every start that took a step went on from the newest checkpoint before it; how many there were."""
    numbers = sorted(int(path.stem.split("-")[1]) for path in folder.root.glob("events-*-0.jsonl"))
    saved: list[Event] = []
    resumes = 0
    for incarnation in numbers:
        events = events_of(folder, incarnation)
        for first in [event for event in events if event.event in ("resume", "step")][:1]:
            before = max((event.step for event in saved if event.t_unix_s < first.t_unix_s), default=0)
            went_on_from = first.step if first.event == "resume" else 0
            assert went_on_from >= before, f"{folder.root.name}, incarnation {incarnation}: {first}"
            resumes += first.event == "resume"
        saved += [event for event in events if event.event == "checkpoint"]
    return resumes


def evict(kube: TestKube, space: str, name: str) -> None:
    """As a drain does; the group's version depends on the server's."""
    body = {"metadata": {"name": name, "namespace": space}, "kind": "Eviction"}
    try:
        kube.api.create(pod_path(space, name, "eviction"), {"apiVersion": "policy/v1", **body})
    except KubeError:
        kube.api.create(pod_path(space, name, "eviction"), {"apiVersion": "policy/v1beta1", **body})


def tenant_pod(name: str, node: str, gpus: int) -> dict[str, Any]:
    """A pod of somebody else that holds GPUs."""
    container = {
        "name": "base",
        "image": "localhost/busybox:1",
        "command": ["sleep", "3600"],
        "resources": {"limits": {GPU: str(gpus)}},
    }
    spec = {"nodeSelector": {"kubernetes.io/hostname": node}, "containers": [container]}
    return {"metadata": {"name": name}, "spec": spec | {"terminationGracePeriodSeconds": 0}}


@contextmanager
def tenant(kube: TestKube, space: str, node: str, gpus: int) -> Iterator[None]:
    """Somebody else's pod, once it runs."""
    path = pod_path(space, name := f"tenant-{uuid4().hex[:8]}")
    kube.api.create(pod_path(space), tenant_pod(name, node, gpus))
    try:
        awaited(lambda: kube.api.get(path)["status"].get("phase"), lambda phase: phase == "Running", 60)
        yield
    finally:
        kube.api.delete(path, grace_s=0)
