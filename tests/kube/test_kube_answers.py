"""An API server that refuses, is slow or cuts its answers off: the scheduler says so, the driver goes on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_jobs import LEASE, SteadyJob
from kube_nodes import TestKube, awaited, host_pod
from kube_proxy import FOR_EVER, Fault, FaultyServer, faulty_server

from pollux.cluster.base import ClusterJob, JobIdentity
from pollux.cluster.k8s import KubeCluster
from pollux.errors import ClusterError, ClusterUnavailable, Conflict, Refused
from pollux_agent.protocol import Allocation, JobSpec

pytestmark = [pytest.mark.needs("kube"), pytest.mark.timeout(900)]

NODES = {"node-0": 4, "node-1": 4}


@pytest.fixture(scope="module")
def space(kube: TestKube) -> str:
    for name, gpus in NODES.items():
        kube.node_up(name, gpus)
    return kube.namespace("pollux-test-answers")


@pytest.fixture
def server(kube: TestKube) -> Iterator[FaultyServer]:
    with faulty_server(kube) as faulty:
        yield faulty


@pytest.fixture(scope="module")
def undriven(kube: TestKube, space: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteadyJob]:
    """A job whose driver never finds a node."""
    settings = kube.settings(space, tmp_path_factory.mktemp("undriven") / "jobs")
    template = host_pod(schedulerName="nobody")
    steady = SteadyJob(KubeCluster(kube.api, settings, namespace=space, user_pod=lambda: template), space)
    yield steady
    steady.cluster.remove(steady.id)


@pytest.fixture(scope="module")
def between(kube: TestKube) -> Iterator[FaultyServer]:
    """Between a driver and the API server; each watch ends with an event."""
    with faulty_server(kube) as faulty:
        faulty.watch_s = 0.0
        yield faulty


@pytest.fixture(scope="module")
def driven(
    kube: TestKube, between: FaultyServer, space: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SteadyJob]:
    jobs = tmp_path_factory.mktemp("driven") / "jobs"
    env = {**kube.settings(space, jobs).driver_env, "KUBERNETES_SERVICE_PORT": str(between.port)}
    settings = kube.settings(space, jobs, grace_s=5.0, driver_env=env)
    steady = SteadyJob(KubeCluster(kube.api, settings, namespace=space, user_pod=host_pod), space)
    yield steady
    steady.end()


@pytest.fixture
def job(driven: SteadyJob, between: FaultyServer) -> Iterator[SteadyJob]:
    """Its driver goes through the faulty server, the test does not."""
    yield driven
    between.faults, between.slow_s = [], 0.0


def observe(cluster: KubeCluster, job_id: str) -> object:
    return cluster.observe()


def stop(cluster: KubeCluster, job_id: str) -> object:
    return cluster.stop(job_id, "clear")


def patch(cluster: KubeCluster, job_id: str) -> object:
    number = cluster.next_decision()
    expected = cluster.job(job_id).allocation.decision
    return cluster.patch_allocation(job_id, expected=expected, allocation=Allocation(decision=number))


def submit(cluster: KubeCluster, job_id: str) -> object:
    identity = JobIdentity(deployment="airflow", dag_id="train", run_id="new", task_id="train")
    spec = JobSpec(name="new", script="a.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=1)
    job = cluster.submit(f"{job_id}-new", identity=identity, spec=spec, run_id=None)
    cluster.remove(job.job_id)
    return job


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
        pytest.param(patch, "patch", 409, Conflict, id="patch, of what was changed meanwhile"),
        pytest.param(stop, "patch", 403, Refused, id="no right to stop"),
        pytest.param(submit, "create", 403, Refused, id="no right to submit"),
        pytest.param(submit, "create", 429, ClusterUnavailable, id="submit, too many requests"),
        pytest.param(lease, "update", 403, ClusterUnavailable, id="no right to the lease"),
        pytest.param(lease, "update", 429, ClusterUnavailable, id="lease, too many requests"),
    ],
)
def test_a_call_that_stays_refused_says_which_and_one_that_is_not_is_made(
    kube: TestKube,
    server: FaultyServer,
    undriven: SteadyJob,
    tmp_path: Path,
    call: Callable[[KubeCluster, str], object],
    verb: str,
    status: int,
    raises: type[ClusterError],
) -> None:
    scheduler = through(server, kube, undriven, tmp_path)
    before = undriven.now.allocation.decision
    server.faults = [Fault(verb, status, FOR_EVER)]
    with pytest.raises(raises, match=f"{status}.*{verb} is refused on purpose"):
        call(scheduler, undriven.id)
    assert undriven.now.allocation.decision == before
    server.faults = [Fault(verb, 429, 2)]
    call(scheduler, undriven.id)
    assert server.faults[0].left == 0


def test_rights_to_tell_and_to_see_quotas_are_missed_by_no_decision(
    kube: TestKube, server: FaultyServer, undriven: SteadyJob, tmp_path: Path
) -> None:
    scheduler = through(server, kube, undriven, tmp_path)
    before = undriven.now.allocation.decision
    server.faults = [
        Fault("create", 403, FOR_EVER, part="/events"),
        Fault("list", 403, FOR_EVER, part="/resourcequotas"),
    ]
    assert undriven.id in {job.job_id for job in scheduler.observe().jobs}
    patch(scheduler, undriven.id)
    assert undriven.now.allocation.decision > before
    assert min(server.refused["create", 403], server.refused["list", 403]) > 0


def test_a_lease_that_others_change_in_the_same_moment_is_theirs_and_a_number_is_asked_for_again(
    kube: TestKube, server: FaultyServer, undriven: SteadyJob, tmp_path: Path
) -> None:
    scheduler = through(server, kube, undriven, tmp_path)
    before = undriven.cluster.next_decision()
    server.faults = [Fault("update", 409, 1)]
    with pytest.raises(Conflict, match="another scheduler"), scheduler.lease("refused", LEASE):
        pass
    with scheduler.lease("refused", LEASE):
        server.faults = [Fault("update", 409, 2)]
        assert scheduler.next_decision() == before + 1
        assert server.faults[0].left == 0


def through(server: FaultyServer, kube: TestKube, job: SteadyJob, folder: Path) -> KubeCluster:
    """The cluster as Airflow sees it where it goes through the faulty server."""
    settings = kube.settings(job.space, folder / "jobs")
    template = host_pod(schedulerName="nobody")
    return KubeCluster(server.api(kube), settings, namespace=job.space, user_pod=lambda: template)


def resized(job: SteadyJob, placement: dict[str, int]) -> Any:
    """Give it other GPUs; its driver starts it there once, with nothing tried in vain."""
    before = job.now.status.incarnation
    job.give(placement)
    status = job.runs_on(placement, above=before).status
    assert status.incarnation == before + 1
    return status


def somewhere(job: SteadyJob) -> ClusterJob:
    """The job as it trains on one GPU of one node, which it may do already."""
    now = job.now
    there = now.status.phase == "running" and list(now.status.held.values()) == [1]
    if not there:
        resized(job, {"node-0": 1})
    return job.now


def lines_of(job: SteadyJob, cursor: str = "") -> tuple[list[str], str]:
    """What its pods printed from ``cursor`` on, and the next cursor; they print on meanwhile."""
    lines: list[str] = []
    for _ in range(10):
        chunk = job.cluster.logs(job.id, cursor)
        lines += chunk.lines
        cursor = chunk.cursor
    return lines, cursor


def test_a_driver_resizes_through_refusals_of_every_verb_and_watches_that_break(
    between: FaultyServer, job: SteadyJob
) -> None:
    somewhere(job)
    for placement, faults in [
        ({"node-0": 2}, {"watch": 410, "create": 429, "patch": 429, "delete": 429}),
        ({"node-0": 1}, {"create": 409}),
    ]:
        between.faults = [Fault(verb, status, 2) for verb, status in faults.items()]
        resized(job, placement)
        assert [fault for fault in between.faults if fault.left] == []
    between.faults = []
    between.slow_s = 1.5
    resized(job, {"node-0": 1, "node-1": 1})


@pytest.mark.parametrize("verb", ["watch", "list", "delete", "patch"])
def test_a_driver_without_one_right_keeps_its_workers_and_goes_on_once_it_has_it(
    between: FaultyServer, job: SteadyJob, verb: str
) -> None:
    before = somewhere(job).status
    other = {node: 1 for node in NODES if node not in before.held}
    _, cursor = lines_of(job)
    between.faults = [Fault(verb, 403, FOR_EVER)]
    if verb == "list":
        between.faults.append(Fault("watch", 410, FOR_EVER))
    refused = between.refused[verb, 403]
    job.give(other)
    awaited(lambda: between.refused[verb, 403], lambda times: times >= refused + 3)
    assert job.now.status.phase not in ("failed", "ended")
    assert len(job.pods()) <= 1
    between.faults = []
    after = job.runs_on(other, above=before.incarnation).status
    assert after.incarnation == before.incarnation + 1
    told, _ = lines_of(job, cursor)
    assert any(f"{verb} is refused on purpose" in line for line in told)
