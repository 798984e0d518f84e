"""An API server that refuses, is slow or cuts its answers off: the scheduler says so, the driver goes on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_jobs import LEASE, SteadyJob
from kube_nodes import TestKube, awaited, host_pod, long_run
from kube_proxy import FOR_EVER, Fault, FaultyServer, faulty_server

from pollux.cluster.k8s import KubeCluster
from pollux.errors import ClusterError, ClusterUnavailable, Refused
from pollux_agent.protocol import Allocation

pytestmark = [pytest.mark.needs("kube"), pytest.mark.timeout(900), long_run]

NODES = {"node-0": 4, "node-1": 4}


@pytest.fixture(scope="module")
def space(kube: TestKube) -> str:
    for name, gpus in NODES.items():
        kube.node_up(name, gpus)
    return kube.namespace("answers")


@pytest.fixture
def server(kube: TestKube) -> Iterator[FaultyServer]:
    with faulty_server(kube) as faulty:
        yield faulty


@pytest.fixture
def job(kube: TestKube, server: FaultyServer, space: str, tmp_path: Path) -> Iterator[SteadyJob]:
    """Its driver goes through the faulty server, where each watch ends with an event; the test does not."""
    settings = kube.settings(space, tmp_path / "jobs", grace_s=5.0)
    server.watch_s = 0.0
    env = {**settings.driver_env, "KUBERNETES_SERVICE_PORT": str(server.port)}
    settings = kube.settings(space, tmp_path / "jobs", grace_s=5.0, driver_env=env)
    steady = SteadyJob(KubeCluster(kube.api, settings, namespace=space, user_pod=host_pod), space)
    yield steady
    server.heal()
    steady.end()


def observe(cluster: KubeCluster, job_id: str) -> object:
    return cluster.observe()


def stop(cluster: KubeCluster, job_id: str) -> object:
    return cluster.stop(job_id, "clear")


def patch(cluster: KubeCluster, job_id: str) -> object:
    number = cluster.next_decision()
    expected = cluster.job(job_id).allocation.decision
    return cluster.patch_allocation(job_id, expected=expected, allocation=Allocation(decision=number))


def lease(cluster: KubeCluster, job_id: str) -> object:
    with cluster.lease("refused", LEASE):
        return cluster.next_decision()


@pytest.mark.parametrize(
    ("call", "verb", "status", "raises"),
    [
        pytest.param(observe, "list", 403, ClusterUnavailable, id="no right to list"),
        pytest.param(observe, "list", 429, ClusterUnavailable, id="list, too many requests"),
        pytest.param(patch, "get", 403, ClusterUnavailable, id="no right to get"),
        pytest.param(patch, "get", 429, ClusterUnavailable, id="get, too many requests"),
        pytest.param(patch, "patch", 403, Refused, id="no right to patch"),
        pytest.param(patch, "patch", 429, ClusterUnavailable, id="patch, too many requests"),
        pytest.param(stop, "patch", 403, Refused, id="no right to stop"),
        pytest.param(lease, "update", 403, ClusterUnavailable, id="no right to the lease"),
        pytest.param(lease, "update", 429, ClusterUnavailable, id="lease, too many requests"),
    ],
)
def test_a_call_that_stays_refused_says_which_and_one_that_is_not_is_made(
    kube: TestKube,
    server: FaultyServer,
    space: str,
    tmp_path: Path,
    call: Callable[[KubeCluster, str], object],
    verb: str,
    status: int,
    raises: type[ClusterError],
) -> None:
    settings = kube.settings(space, tmp_path / "jobs")
    steady = SteadyJob(KubeCluster(kube.api, settings, namespace=space, user_pod=host_pod), space)
    scheduler = KubeCluster(server.api(kube), settings, namespace=space)
    try:
        server.faults = [Fault(verb, status, FOR_EVER)]
        with pytest.raises(raises, match=f"{status}.*{verb} is refused on purpose"):
            call(scheduler, steady.id)
        assert steady.now.allocation.decision == 0
        server.faults = [Fault(verb, 429, 2)]
        call(scheduler, steady.id)
        assert server.faults[0].left == 0
    finally:
        server.heal()
        steady.end()


def resized(job: SteadyJob, placement: dict[str, int]) -> Any:
    """Give it other GPUs; its driver starts it there once, with nothing tried in vain."""
    before = job.now.status.incarnation
    job.give(placement)
    status = job.runs_on(placement, above=before).status
    assert status.incarnation == before + 1
    return status


def test_a_driver_resizes_through_refusals_of_every_verb_and_watches_that_break(
    server: FaultyServer, job: SteadyJob
) -> None:
    resized(job, {"node-0": 1})
    for placement, verb, status in [
        ({"node-0": 2}, "watch", 410),
        ({"node-0": 1}, "create", 429),
        ({"node-0": 2}, "patch", 429),
        ({"node-0": 1}, "delete", 429),
    ]:
        server.faults = [Fault(verb, status, 2)]
        resized(job, placement)
        assert server.faults[0].left == 0, verb
    server.heal()
    server.slow_s = 1.5
    resized(job, {"node-0": 1, "node-1": 1})


@pytest.mark.parametrize("verb", ["watch", "list", "delete", "patch"])
def test_a_driver_without_one_right_keeps_its_workers_and_goes_on_once_it_has_it(
    server: FaultyServer, job: SteadyJob, verb: str
) -> None:
    before = resized(job, {"node-0": 1})
    server.faults = [Fault(verb, 403, FOR_EVER)]
    if verb == "list":
        server.faults.append(Fault("watch", 410, FOR_EVER))
    job.give({"node-1": 1})
    awaited(lambda: server.refused[verb, 403], lambda times: times >= 3)
    assert job.now.status.phase not in ("failed", "ended")
    assert len(job.pods()) <= 1
    server.heal()
    after = job.runs_on({"node-1": 1}, above=before.incarnation).status
    assert after.incarnation == before.incarnation + 1
    told = job.cluster.logs(job.id).lines
    assert any(f"{verb} is refused on purpose" in line for line in told)
