"""Random faults over three trainings on real nodes: what has to hold, holds throughout, and all go on after.

POLLUX_SOAK_S sets how long (default: ten minutes), POLLUX_SOAK_SEED which faults.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kube_jobs import SteadyJob, check_resumes, tenant_pod
from kube_nodes import GPU, TestKube, awaited, host_pod

from pollux.cluster.k8s import KubeCluster
from pollux.cluster.k8s.nodes import quantity
from pollux.errors import ClusterError, DriverLost, UnknownJob
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import KubeApi, pod_path
from pollux_agent.protocol import JobFolder

pytestmark = [pytest.mark.needs("kube"), pytest.mark.e2e, pytest.mark.timeout(0)]

NODES = {"node-0": 4, "node-1": 4}
SPACE = "pollux-test-soak"
EVERY_S = 5.0
ORPHAN_S = 60.0
"""Until a worker without its driver is told to end."""
END_S = 180.0
"""Until a pod that is told to end is gone from a node that is ready; the kubelet of 1.20 takes up to 90 s."""
NODE_LOST_S = 75.0
CALM_S = 300.0
FAULTS = {
    "resize": 8,
    "worker killed": 3,
    "driver deleted": 2,
    "foreign pod": 2,
    "server frozen": 1,
    "node cordoned": 1,
    "node lost": 1,
}


class Soak:
    """Jobs, faults that come by chance, and what is checked again and again."""

    def __init__(self, kube: TestKube, jobs: list[SteadyJob], rng: random.Random, until_s: float) -> None:
        self.kube, self.jobs, self.rng, self.until_s = kube, jobs, rng, until_s
        self.api: KubeApi = kube.api
        self.counts: Counter[str] = Counter()
        self.since: dict[tuple[str, str], float] = {}
        self.best: dict[str, int] = {}
        self.tenants: dict[str, float] = {}
        self.cordoned = ""
        self.down: tuple[str, float] | None = None

    # --- faults

    def fault(self) -> None:
        (name,) = self.rng.choices(list(FAULTS), weights=list(FAULTS.values()))
        if getattr(self, "_" + name.replace(" ", "_"))() is not False:
            self.counts[name] += 1

    def _resize(self) -> None:
        for job_id, placement in self._share().items():
            job = next(job for job in self.jobs if job.id == job_id)
            try:
                job.give(placement)
            except ClusterError:
                self.counts["not patched"] += 1

    def _share(self) -> dict[str, dict[str, int]]:
        """A random division of the GPUs that are there."""
        free = self.jobs[0].sizes()
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

    def _worker_killed(self) -> bool:
        pods = [pod for job in self.jobs for pod in job.pods()]
        if pods:
            victim = self.rng.choice(pods)["metadata"]["name"]
            self.api.delete(pod_path(SPACE, victim), grace_s=self.rng.choice([1, 10]))
        return bool(pods)

    def _driver_deleted(self) -> None:
        job = self.rng.choice(self.jobs)
        with suppress(UnknownJob):
            job.cluster.remove(job.id)

    def _foreign_pod(self) -> None:
        name = f"tenant-{self.counts['foreign pod']}"
        self.api.create(pod_path(SPACE), tenant_pod(name, self.rng.choice(list(NODES)), 2))
        self.tenants[name] = time.monotonic() + 2 * EVERY_S

    def _server_frozen(self) -> bool:
        if self.kube.state is None:
            return False
        pid = int((self.kube.state / "run" / "kube-apiserver.pid").read_text().split()[0])
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(EVERY_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        return True

    def _node_cordoned(self) -> bool:
        if self.cordoned or self.down:
            return False
        self.cordoned = self.rng.choice(list(NODES))
        self.api.patch(f"/api/v1/nodes/{self.cordoned}", {"spec": {"unschedulable": True}})
        return True

    def _node_lost(self) -> bool:
        if self.cordoned or self.down or self.kube.scripts is None:
            return False
        if time.monotonic() + 2 * NODE_LOST_S > self.until_s:
            return False
        name = self.rng.choice(list(NODES))
        self.kube.node_down(name, crash=True)
        self.down = (name, time.monotonic() + NODE_LOST_S)
        return True

    def heal(self, *, all_of_it: bool = False) -> None:
        """End what was to last for a while, and submit jobs without a driver again, as the operator does."""
        now_s = time.monotonic()
        for name, due_s in list(self.tenants.items()):
            if all_of_it or now_s >= due_s:
                self.api.delete(pod_path(SPACE, name), grace_s=0)
                del self.tenants[name]
        if self.cordoned and (all_of_it or self.rng.random() < 0.1):
            self.api.patch(f"/api/v1/nodes/{self.cordoned}", {"spec": {"unschedulable": None}})
            self.cordoned = ""
        if self.down and (all_of_it or now_s >= self.down[1]):
            self.kube.node_up(self.down[0], NODES[self.down[0]])
            self.down = None
        for job in self.jobs:
            try:
                job.now  # noqa: B018
            except (UnknownJob, DriverLost):
                job.submit()
                self.counts["drivers made again"] += 1

    # --- what must hold

    def check(self) -> None:
        """No GPU is held twice, no pod outlives its time, no job fails or counts its starts back."""
        pods = [pod for pod in self.api.items(pod_path(SPACE)) if not doc.is_terminal(pod)]
        held: Counter[str] = Counter()
        for pod in pods:
            limits = pod["spec"]["containers"][0].get("resources", {}).get("limits") or {}
            held[pod["spec"].get("nodeName", "")] += quantity(limits.get(GPU))
        assert all(held[node] <= gpus for node, gpus in NODES.items()), held
        self._check_ends(pods)
        for job in self.jobs:
            try:
                status = job.now.status
            except (UnknownJob, DriverLost):
                continue
            assert status.phase not in ("failed", "ended"), f"{job.id}: {status.message}"
            assert status.incarnation >= self.best.get(job.id, 0) or status.incarnation == 0
            self.best[job.id] = max(self.best.get(job.id, 0), status.incarnation)
        self.counts["checks"] += 1

    def _check_ends(self, pods: list[dict[str, Any]]) -> None:
        """Pods on nodes that are ready end in time; those on a lost one are forgotten when jobs move on."""
        uids = {pod["metadata"]["uid"] for pod in pods}
        now_s = time.monotonic()
        since: dict[tuple[str, str], float] = {}
        for pod in pods:
            meta = pod["metadata"]
            owners = meta.get("ownerReferences") or []
            if self.down and pod["spec"].get("nodeName") == self.down[0]:
                continue
            if meta.get("deletionTimestamp"):
                since["ends", meta["uid"]] = self.since.get(("ends", meta["uid"]), now_s)
            elif owners and owners[0]["uid"] not in uids:
                since["orphan", meta["uid"]] = self.since.get(("orphan", meta["uid"]), now_s)
        self.since = since
        limits = {"ends": END_S, "orphan": ORPHAN_S}
        late = {key for key, began_s in since.items() if now_s - began_s > limits[key[0]]}
        assert not late, late

    def settle(self) -> None:
        """Without faults all jobs come to work where they are told to."""
        wanted = {job.id: {f"node-{number % 2}": 1} for number, job in enumerate(self.jobs)}

        def at_work() -> bool:
            self.heal(all_of_it=True)
            self.check()
            done = True
            for job in self.jobs:
                with suppress(ClusterError):
                    now = job.now
                    if dict(now.allocation.placement) != wanted[job.id]:
                        job.give(wanted[job.id])
                    done &= now.status.phase == "running" and dict(now.status.held) == wanted[job.id]
                    continue
                done = False
            return done

        awaited(at_work, timeout_s=CALM_S)


def seconds() -> float:
    return float(os.environ.get("POLLUX_SOAK_S", "600"))


@pytest.fixture
def jobs(kube: TestKube, tmp_path: Path) -> Iterator[list[SteadyJob]]:
    for name, gpus in NODES.items():
        kube.node_up(name, gpus)
    space = kube.namespace(SPACE)
    settings = kube.settings(space, tmp_path / "jobs", place_wait_s=10.0, grace_s=5.0, lost_after_s=5.0)
    cluster = KubeCluster(kube.api, settings, namespace=space, user_pod=host_pod)
    enough = ["--steps", str(10_000 + round(10 * seconds()))]  # each takes a tenth of a second at least
    started: list[SteadyJob] = [SteadyJob(cluster, space, arguments=enough) for _ in range(3)]
    yield started
    for job in started:
        job.ask_to_end()
    for job in started:
        job.end()


def test_random_faults(
    kube: TestKube, jobs: list[SteadyJob], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("POLLUX_SOAK_SEED", "0"))
    until_s = time.monotonic() + seconds()
    soak = Soak(kube, jobs, random.Random(seed), until_s)
    try:
        while time.monotonic() < until_s:
            due_s = time.monotonic() + EVERY_S
            soak.fault()
            while time.monotonic() < due_s:
                soak.heal()
                soak.check()
                time.sleep(0.5)
        soak.settle()
    finally:
        soak.heal(all_of_it=True)
        with capsys.disabled():
            print(f"\nsoak of {seconds():.0f} s, seed {seed}: {dict(soak.counts)}, starts {soak.best}")
    resumes = [check_resumes(JobFolder(tmp_path / "jobs" / job.id)) for job in jobs]
    with capsys.disabled():
        print(f"starts that went on from the newest checkpoint: {resumes}")
    assert sum(resumes) > 0
