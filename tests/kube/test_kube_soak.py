"""Random faults over three trainings on real nodes: what has to hold, holds throughout, and all go on after.

POLLUX_SOAK_S sets how long (default: a minute), POLLUX_SOAK_SEED which faults.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_jobs import SteadyJob, tenant
from kube_nodes import GPU, TestKube, awaited, host_pod, long_run

from pollux.cluster.k8s import KubeCluster
from pollux.cluster.k8s.nodes import quantity
from pollux.errors import ClusterError, UnknownJob
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path

pytestmark = [pytest.mark.needs("kube"), pytest.mark.e2e, pytest.mark.timeout(3600)]

NODES = {"node-0": 4, "node-1": 4}
SPACE = "soak"
EVERY_S = 5.0
ORPHAN_S = 60.0


class Soak:
    """Jobs, faults that come by chance, and what is checked again and again."""

    def __init__(self, kube: TestKube, jobs: list[SteadyJob], rng: random.Random) -> None:
        self.kube, self.jobs, self.rng = kube, jobs, rng
        self.api: KubeApi = kube.api
        self.counts: Counter[str] = Counter()
        self.orphans: dict[str, float] = {}
        self.best: dict[str, int] = {}

    def fault(self) -> None:
        name = self.rng.choice(["resize", "resize", "resize", "worker", "driver", "tenant"])
        self.counts[name] += 1
        getattr(self, f"_{name}")()

    def check(self) -> None:
        """No GPU is held twice, no worker outlives its driver by a minute, no job counts its starts back."""
        pods = list(self.api.items(pod_path(SPACE)))
        uids = {pod["metadata"]["uid"] for pod in pods}
        held: Counter[str] = Counter()
        orphans = set()
        for pod in pods:
            if doc.is_terminal(pod):
                continue
            limits = pod["spec"]["containers"][0].get("resources", {}).get("limits") or {}
            held[pod["spec"].get("nodeName", "")] += quantity(limits.get(GPU))
            owners = pod["metadata"].get("ownerReferences") or []
            if owners and owners[0]["uid"] not in uids:
                orphans.add(pod["metadata"]["uid"])
        assert all(held[node] <= gpus for node, gpus in NODES.items()), held
        now_s = time.monotonic()
        self.orphans = {uid: self.orphans.get(uid, now_s) for uid in orphans}
        assert all(now_s - since_s < ORPHAN_S for since_s in self.orphans.values()), "orphans stay"
        for job in self.jobs:
            try:
                status = job.now.status
            except UnknownJob:
                continue
            assert status.phase not in ("failed", "ended"), f"{job.id}: {status.message}"
            assert status.incarnation >= self.best.get(job.id, 0) or status.incarnation == 0
            self.best[job.id] = max(self.best.get(job.id, 0), status.incarnation)
        self.counts["checks"] += 1

    def repair(self) -> None:
        """As the operator does: a job without its driver is submitted again."""
        for job in self.jobs:
            try:
                job.now  # noqa: B018
            except UnknownJob:
                job.submit()
                self.counts["repairs"] += 1

    def share(self) -> dict[str, dict[str, int]]:
        """A random division of the GPUs that are there."""
        free = {node.name: node.gpus for node in self.jobs[0].cluster.observe().nodes}
        wanted: dict[str, dict[str, int]] = {}
        for job in self.rng.sample(self.jobs, len(self.jobs)):
            placement: dict[str, int] = {}
            for node in free:
                gpus = self.rng.randint(0, min(1, free[node]))
                if gpus:
                    placement[node] = gpus
                    free[node] -= gpus
            wanted[job.id] = placement
        return wanted

    def _resize(self) -> None:
        for job_id, placement in self.share().items():
            job = next(job for job in self.jobs if job.id == job_id)
            try:
                job.give(placement)
            except ClusterError:
                self.counts["not patched"] += 1

    def _worker(self) -> None:
        pods = [pod for job in self.jobs for pod in job.pods()]
        if pods:
            victim = self.rng.choice(pods)["metadata"]["name"]
            self.api.delete(pod_path(SPACE, victim), grace_s=self.rng.choice([1, 10]))

    def _driver(self) -> None:
        job = self.rng.choice(self.jobs)
        try:
            job.cluster.remove(job.id)
        except UnknownJob:
            self.counts["was gone"] += 1

    def _tenant(self) -> None:
        try:
            with tenant(self.kube, SPACE, self.rng.choice(list(NODES)), 2):
                time.sleep(EVERY_S)
                self.check()
        except KubeError:
            self.counts["no room"] += 1


@pytest.fixture
def jobs(kube: TestKube, tmp_path: Path) -> Iterator[list[SteadyJob]]:
    for name, gpus in NODES.items():
        kube.node_up(name, gpus)
    space = kube.namespace(SPACE)
    settings = kube.settings(space, tmp_path / "jobs", place_wait_s=10.0, grace_s=5.0)
    cluster = KubeCluster(kube.api, settings, namespace=space, user_pod=host_pod)
    started: list[SteadyJob] = [SteadyJob(cluster, space) for _ in range(3)]
    yield started
    for job in started:
        job.end()


@long_run
def test_random_faults(kube: TestKube, jobs: list[SteadyJob], capsys: Any) -> None:
    seconds = float(os.environ.get("POLLUX_SOAK_S", "60"))
    soak = Soak(kube, jobs, random.Random(int(os.environ.get("POLLUX_SOAK_SEED", "0"))))
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        soak.fault()
        due_s = time.monotonic() + EVERY_S
        while time.monotonic() < due_s:
            soak.repair()
            soak.check()
            time.sleep(0.5)
    soak.repair()
    for number, job in enumerate(jobs):
        awaited(lambda job=job: job.now.status.phase, lambda phase: phase not in ("stopping",), 60)
        job.give({f"node-{number % 2}": 1})
    for number, job in enumerate(jobs):
        job.runs_on({f"node-{number % 2}": 1}, timeout_s=180)
    soak.check()
    with capsys.disabled():
        print(f"\nsoak of {seconds:.0f} s: {dict(soak.counts)}, starts {soak.best}")
