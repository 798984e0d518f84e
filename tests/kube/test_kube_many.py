"""Many jobs in one namespace, and several schedulers on one cluster."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kube_jobs import LEASE, SteadyJob, tenant
from kube_nodes import TestKube, awaited, host_pod
from kube_proxy import Fault, faulty_server
from mlflow_store import mlflow_uri, new_experiment

from pollux.cluster.base import ClusterView, JobIdentity
from pollux.cluster.k8s import KubeCluster
from pollux.cycle import CycleResult, run_once
from pollux.record import Records
from pollux.settings import Settings
from pollux.store import ModelStore
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import PAGE_SIZE, pod_path
from pollux_agent.protocol import JobSpec, encode

__all__ = ["mlflow_uri", "new_experiment"]

pytestmark = [pytest.mark.needs("kube"), pytest.mark.timeout(900)]

NODES = {"node-0": 4, "node-1": 4}
NUM_JOBS = 2_000
_SUBMITTERS = 8


@pytest.fixture
def crowd(kube: TestKube, tmp_path: Path) -> Iterator[KubeCluster]:
    """A namespace of jobs whose drivers nobody schedules: one that was submitted, and others like it."""
    space = kube.namespace("pollux-test-crowd")
    settings = kube.settings(space, tmp_path / "jobs")
    spec = JobSpec(name="one", script="one.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=1)
    who = JobIdentity(deployment="crowd", dag_id="d", run_id="0", task_id="t")
    template = host_pod(schedulerName="nobody")
    cluster = KubeCluster(kube.api, settings, namespace=space, user_pod=lambda: template)
    cluster.submit("job-0", identity=who, spec=spec, run_id="run")
    first = kube.api.get(pod_path(space, "job-0"))

    def submit(numbers: range) -> None:
        api = kube.api
        for number in numbers:
            labels = doc.labels(first) | {doc.JOB: f"job-{number}"}
            notes = doc.annotations(first) | {doc.IDENTITY: encode(replace(who, run_id=str(number)))}
            meta = {"name": f"job-{number}", "labels": labels, "annotations": notes}
            api.create(pod_path(space), {"metadata": meta, "spec": first["spec"]})

    with ThreadPoolExecutor(_SUBMITTERS) as pool:
        shares = [range(1 + share, NUM_JOBS, _SUBMITTERS) for share in range(_SUBMITTERS)]
        list(pool.map(submit, shares))
    yield KubeCluster(kube.api, settings)
    kube.api.delete(f"/api/v1/namespaces/{space}")
    awaited(lambda: list(kube.api.items(f"/api/v1/namespaces/{space}/pods")), lambda left: not left, 300)


def of_crowd(view: ClusterView) -> int:
    return sum(job.identity.deployment == "crowd" for job in view.jobs)


def test_a_namespace_of_two_thousand_jobs_is_read_in_a_bounded_number_of_calls(
    kube: TestKube, crowd: KubeCluster, tmp_path: Path
) -> None:
    with crowd.lease("crowd", LEASE):
        before = crowd.api.num_calls
        number = crowd.next_decision()
        view = crowd.observe()
        calls = crowd.api.num_calls - before
    others = sum(1 for _ in kube.api.items("/api/v1/pods")) - NUM_JOBS
    pages = -(-(NUM_JOBS + others) // PAGE_SIZE)
    assert number > 0
    assert of_crowd(view) == NUM_JOBS
    assert calls <= 2 * pages + 4, "drivers and pods by page; nodes, quotas, and the lease read and written"

    with faulty_server(kube) as server:
        server.faults = [Fault("list", 410, 1, part="continue=")]
        through = KubeCluster(server.api(kube), kube.settings("pollux-test-crowd", tmp_path / "jobs"))
        assert of_crowd(through.observe()) == NUM_JOBS, "a list that expired half-way starts over"
        assert server.faults[0].left == 0
        assert server.counts["list"] <= 2 * pages + 3


Scheduler = Callable[[], CycleResult]


def test_two_deployments_share_a_cluster_and_each_acts_on_its_own_jobs(
    kube: TestKube, mlflow_uri: str, new_experiment: Callable[[str], str], tmp_path: Path
) -> None:
    for name, gpus in NODES.items():
        kube.node_up(name, gpus)
    jobs: dict[str, list[SteadyJob]] = {}
    schedulers: dict[str, Scheduler] = {}
    for deployment in ("east", "west"):
        space = kube.namespace(f"pollux-test-{deployment}")
        kube_settings = kube.settings(space, tmp_path / "jobs", lease_namespace="default")
        bound = KubeCluster(kube.api, kube_settings, namespace=space, user_pod=host_pod)
        jobs[deployment] = [
            SteadyJob(bound, space, deployment=deployment, kind="rigid", max_gpus=1) for _ in range(2)
        ]
        settings = Settings(
            state=tmp_path / deployment,
            deployment=deployment,
            free_wait_s=0.0,
            mlflow_tracking_uri=mlflow_uri,
            experiment=new_experiment(deployment),
            decisions_experiment=new_experiment(f"{deployment}-decisions"),
        )
        schedulers[deployment] = _scheduler(KubeCluster(kube.api, kube_settings), settings)
    numbers: dict[str, set[int]] = {"east": set(), "west": set()}
    skipped: list[str] = []

    def schedule(deployment: str, times: int) -> None:
        for _ in range(times):
            result = schedulers[deployment]()
            if result.decision is None:
                skipped.append(result.skipped)
            else:
                numbers[deployment].add(result.decision)

    def given() -> list[int]:
        return [job.now.allocation.num_gpus for group in jobs.values() for job in group]

    try:
        with tenant(kube, "pollux-test-east", "node-0", 3), tenant(kube, "pollux-test-west", "node-1", 3):
            threads = [threading.Thread(target=schedule, args=(name, 5)) for name in jobs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for name in jobs:
                schedule(name, 1)
            assert sum(given()) == 2, "one GPU is left on each node, and no job shares one"
            for name, group in jobs.items():
                for job in group:
                    assert job.now.allocation.decision in numbers[name] | {0}
            with jobs["east"][0].cluster.lease("east", LEASE):
                assert "another scheduler" in schedulers["west"]().skipped
        for name in jobs:
            schedule(name, 1)
        assert given() == [1, 1, 1, 1]
        assert not numbers["east"] & numbers["west"]
        assert all("another scheduler" in why for why in skipped), skipped
    finally:
        for group in jobs.values():
            for job in group:
                job.end()


def _scheduler(cluster: KubeCluster, settings: Settings) -> Scheduler:
    store = ModelStore(
        settings.mlflow_tracking_uri,
        experiment=settings.experiment,
        decisions_experiment=settings.decisions_experiment,
        deployment=settings.deployment,
    )
    records = Records(settings.decisions)

    def cycle() -> CycleResult:
        now: Any = cluster.api.get("/version") and cluster.api.server_unix_s
        return run_once(cluster, store, settings, now=now, holder=settings.deployment, records=records)

    return cycle
