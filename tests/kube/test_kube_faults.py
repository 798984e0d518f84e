"""What clusters do to a job, on real nodes: it goes on, or ends with the cause, and no GPU is held twice."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_jobs import Start, SteadyJob, check_resumes, evict, starting, steps_of, tenant, tenant_pod
from kube_nodes import DRIVER_ACCOUNT, GPU, TestKube, awaited, processes

from pollux.cluster.k8s import KubeCluster
from pollux.errors import ClusterUnavailable, Refused
from pollux_agent.driver.kube.api import pod_path
from pollux_agent.protocol import JobFolder

pytestmark = [pytest.mark.needs("kube"), pytest.mark.timeout(600)]

NODES = {"node-0": 4, "node-1": 4}
NAMESPACE = "pollux-test-faults"
AWAY_S = 60.0
PLACE_WAIT_S = 6


@pytest.fixture(scope="module")
def space(kube: TestKube) -> str:
    for name, gpus in NODES.items():
        kube.node_up(name, gpus)
    return kube.namespace(NAMESPACE)


@pytest.fixture
def start(kube: TestKube, space: str, tmp_path: Path) -> Iterator[Start]:
    settings = kube.settings(space, tmp_path / "jobs", place_wait_s=PLACE_WAIT_S, lost_after_s=3.0)
    with starting(kube, settings) as start:
        yield start


def drives_on(kube: TestKube, node: str, start: Start) -> SteadyJob:
    """A job whose driver's pod is on that node."""
    others = [name for name in NODES if name != node]
    for name in others:
        kube.api.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})
    try:
        job = start()
        path = pod_path(NAMESPACE, job.id)
        awaited(lambda: kube.api.get(path)["spec"].get("nodeName"), lambda seen: seen == node, 60)
    finally:
        for name in others:
            kube.api.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": None}})
    return job


def test_gpus_of_a_pod_that_is_about_to_end_are_waited_for(kube: TestKube, start: Start) -> None:
    leaver = tenant_pod("leaver", "node-0", 4)
    leaver["spec"]["terminationGracePeriodSeconds"] = 3 * PLACE_WAIT_S  # which it takes: it hears no SIGTERM
    kube.api.create(pod_path(NAMESPACE), leaver)
    path = pod_path(NAMESPACE, "leaver")
    awaited(lambda: kube.api.get(path)["status"].get("phase"), lambda phase: phase == "Running", 60)
    job = start()
    kube.api.delete(path)
    job.force({"node-0": 1})
    assert job.runs_on({"node-0": 1}).status.incarnation == 1


def test_gpus_that_a_foreign_pod_took_send_the_job_back_to_what_it_had(kube: TestKube, start: Start) -> None:
    job = start()
    job.give({"node-0": 1})
    job.runs_on({"node-0": 1})
    with tenant(kube, NAMESPACE, "node-1", 4):
        with pytest.raises(Refused, match="node-1"):
            job.give({"node-0": 1, "node-1": 2})
        number = job.force({"node-0": 1, "node-1": 2})
        back = awaited(
            lambda: job.now,
            lambda now: (
                now.status.phase == "running"
                and now.status.acted_decision == number
                and now.status.incarnation >= 3
            ),
            120,
        )
        assert dict(back.status.held) == {"node-0": 1}
        assert "Insufficient nvidia.com/gpu" in back.status.message
        seen = {node.name: node.gpus for node in job.cluster.observe().nodes}
        assert seen == {"node-0": 4, "node-1": 0}
    job.give({"node-0": 1, "node-1": 2})
    assert "Insufficient" not in job.runs_on({"node-0": 1, "node-1": 2}).status.message


def test_a_node_that_is_cut_off_is_left_and_what_goes_on_there_is_forgotten_and_fenced_off(
    kube: TestKube, start: Start, tmp_path: Path
) -> None:
    """Its workers train on for nobody, until they find that a later incarnation has begun."""
    job = drives_on(kube, "node-0", start)
    folder = JobFolder(tmp_path / "jobs" / job.id)
    job.give({"node-1": 1})
    first = job.runs_on({"node-1": 1}).status.incarnation
    of_first = (f"POLLUX_JOB_ID={job.id}", f"POLLUX_INCARNATION={first}")
    with kube.cut_off("node-1"):
        awaited(
            lambda: {node.name for node in job.cluster.observe().nodes},
            lambda names: names == {"node-0"},
            90,
        )
        time.sleep(4)  # until it has been silent for lost_after_s
        assert processes("", *of_first), "they go on"
        saved = max(steps_of(folder, "checkpoint", first))
        job.give({"node-0": 1})
        second = job.runs_on({"node-0": 1}, above=first).status.incarnation
        assert [pod["spec"]["nodeName"] for pod in job.pods()] == ["node-0"]
        awaited(lambda: processes("", *of_first), lambda left: not left, 60)
        assert "has begun" in folder.outcome(first, 0).read_text()
        assert job.now.status.incarnation == second
        assert check_resumes(folder) == 1
        assert steps_of(folder, "resume", second)[0] >= saved > 0
    awaited(job.sizes, lambda sizes: sizes == NODES, 60)
    assert job.now.status.incarnation == second, "a node that is back changes nothing"


def test_a_node_that_is_deleted_while_its_pods_run_is_left(kube: TestKube, start: Start) -> None:
    """Its kubelet and workers live on, as where somebody takes a node out of the cluster by hand."""
    job, other = drives_on(kube, "node-0", start), drives_on(kube, "node-0", start)
    other.give({"node-0": 1})
    untouched = other.runs_on({"node-0": 1}).status.incarnation
    job.give({"node-1": 1})
    first = job.runs_on({"node-1": 1}).status
    kube.api.delete("/api/v1/nodes/node-1")
    try:
        awaited(job.sizes, lambda sizes: sizes == {"node-0": NODES["node-0"]}, 60)
        with pytest.raises(Refused, match="node-1"):
            other.give({"node-1": 1})
        job.give({"node-0": 2})
        job.runs_on({"node-0": 2}, above=first.incarnation)
        assert [pod["spec"]["nodeName"] for pod in job.pods()] == ["node-0"]
        awaited(lambda: job.cluster.held(), lambda held: held[job.id] == {"node-0": 2}, 60)
        assert other.now.status.incarnation == untouched
    finally:
        kube.node_down("node-1")
        kube.node_up("node-1", NODES["node-1"])
    awaited(job.sizes, lambda sizes: sizes == NODES, 60)


def test_a_driver_without_rights_says_which_and_goes_on_once_it_has_them(
    kube: TestKube, start: Start
) -> None:
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/{DRIVER_ACCOUNT}"
    role = kube.api.get(path)
    verbs = role["rules"][0]["verbs"]
    kube.api.patch(
        path, [{"op": "replace", "path": "/rules/0/verbs", "value": sorted({*verbs} - {"create"})}]
    )
    job = start()
    try:
        job.give({"node-0": 1})
        told = awaited(lambda: job.now.status.message, lambda message: "forbidden" in message, 60)
        assert "cannot create resource" in told
        assert job.now.status.phase not in ("failed", "ended")
    finally:
        kube.api.patch(path, [{"op": "replace", "path": "/rules/0/verbs", "value": verbs}])
    job.give({"node-0": 1})
    job.runs_on({"node-0": 1})


def test_an_api_server_that_is_away_stops_no_training(kube: TestKube, start: Start, tmp_path: Path) -> None:
    if kube.state is None:
        pytest.skip("needs kube: only an API server that the tests started can be stopped")
    job = start()
    folder = JobFolder(tmp_path / "jobs" / job.id)
    job.give({"node-0": 1})
    first = job.runs_on({"node-0": 1})
    pid = int((kube.state / "run" / "kube-apiserver.pid").read_text().split()[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        slow = KubeCluster(kube.api, kube.settings(NAMESPACE, kube.folder), namespace=NAMESPACE)
        slow.api.read_s = 0.5
        with pytest.raises(ClusterUnavailable):
            slow.observe()
        reached = max(steps_of(folder, "step", first.status.incarnation))
        time.sleep(AWAY_S)
        assert max(steps_of(folder, "step", first.status.incarnation)) > reached
    finally:
        os.kill(pid, signal.SIGCONT)
    after = awaited(lambda: job.now, lambda now: now.status.phase == "running", 60)
    assert after.status.incarnation == first.status.incarnation
    awaited(lambda: given(job, {"node-0": 2}), bool, 120)
    job.runs_on({"node-0": 2})


def given(job: SteadyJob, placement: dict[str, int]) -> bool:
    """Whether it could be: nodes whose kubelets were not heard count as lost for some seconds."""
    try:
        job.give(placement)
    except Refused:
        return False
    return True


def test_a_quota_caps_what_is_given_also_once_it_is_lowered(kube: TestKube, start: Start) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    kube.api.create(path, {"metadata": {"name": "lower"}, "spec": {"hard": {f"requests.{GPU}": "3"}}})
    try:
        used = lambda: kube.api.get(f"{path}/lower").get("status", {}).get("used") or {}  # noqa: E731
        awaited(used, lambda found: found.get(f"requests.{GPU}") == "0", 120)
        job = start()
        assert sum(job.sizes().values()) == 3
        job.give({"node-0": 2})
        first = job.runs_on({"node-0": 2}).status
        kube.api.patch(f"{path}/lower", {"spec": {"hard": {f"requests.{GPU}": "1"}}})
        awaited(lambda: sum(job.sizes().values()), lambda gpus: gpus == 1, 60)
        assert job.now.status.incarnation == first.incarnation, "nobody takes what it has but a decision"
        job.give({"node-0": 1})
        second = job.runs_on({"node-0": 1}, above=first.incarnation).status
        with pytest.raises(Refused, match="node-0"):
            job.give({"node-0": 2})
        number = job.force({"node-0": 2})
        back = awaited(
            lambda: job.now.status,
            lambda now: (
                now.acted_decision == number
                and now.phase == "running"
                and now.incarnation > second.incarnation
            ),
            180,
        )
        assert dict(back.held) == {"node-0": 1}
        assert "exceeded quota" in back.message
    finally:
        kube.api.delete(f"{path}/lower")


def test_a_cordoned_node_keeps_what_it_has_and_a_drained_one_is_left(kube: TestKube, start: Start) -> None:
    job, other = start(), start()
    job.give({"node-1": 1})
    first = job.runs_on({"node-1": 1}).status
    kube.api.patch("/api/v1/nodes/node-1", {"spec": {"unschedulable": True}})
    try:
        awaited(job.sizes, lambda sizes: sizes == {"node-0": 4, "node-1": 1}, 30)
        with pytest.raises(Refused, match="node-1"):
            other.give({"node-1": 2})
        assert job.now.status.incarnation == first.incarnation
        evict(kube, NAMESPACE, job.pods()[0]["metadata"]["name"])
        awaited(job.sizes, lambda sizes: not sizes.get("node-1"), 60)
        job.give({"node-0": 1})
        job.runs_on({"node-0": 1}, above=first.incarnation)
        assert [pod["spec"]["nodeName"] for pod in job.pods()] == ["node-0"]
    finally:
        kube.api.patch("/api/v1/nodes/node-1", {"spec": {"unschedulable": None}})
    awaited(job.sizes, lambda sizes: sizes == NODES, 30)


def test_a_pod_that_ends_for_ever_holds_nobody_up(kube: TestKube, start: Start) -> None:
    job, other = start(), start()
    job.give({"node-0": 3})
    first = job.runs_on({"node-0": 3}).status
    stuck = pod_path(NAMESPACE, job.pods()[0]["metadata"]["name"])
    kube.api.patch(stuck, {"metadata": {"finalizers": ["pollux.dev/of-a-test"]}})
    try:
        job.give({"node-1": 1})
        job.runs_on({"node-1": 1}, above=first.incarnation)
        assert kube.api.get(stuck)["metadata"]["deletionTimestamp"]
        other.give({"node-0": 2})
        other.runs_on({"node-0": 2})
    finally:
        kube.api.patch(stuck, {"metadata": {"finalizers": None}})
