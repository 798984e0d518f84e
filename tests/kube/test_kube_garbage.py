"""Garbage on pods and in the Lease of a real API server: cycles go on, and what can be put right is."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kube_jobs import LEASE, SteadyJob
from kube_nodes import TestKube, host_pod

from pollux.cluster.k8s import KubeCluster
from pollux.cluster.k8s.lease import NAME
from pollux.errors import DriverLost, Refused, UnknownJob
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import pod_path
from pollux_agent.protocol import Allocation, encode

pytestmark = [pytest.mark.needs("kube"), pytest.mark.timeout(300)]

GARBAGE = [None, "", "{garbage", "[]", "-1", "999999999999999999999", "9007199254740000", "\u00b2"]


@pytest.fixture(scope="module")
def spaces(kube: TestKube) -> tuple[str, str]:
    """Ours, and somebody else's."""
    return kube.namespace("pollux-test-garbage"), kube.namespace("pollux-test-elsewhere")


@pytest.fixture
def submit(kube: TestKube, spaces: tuple[str, str], tmp_path: Path) -> Iterator[Callable[[], SteadyJob]]:
    """Submit a job whose driver never finds a node."""
    made: list[SteadyJob] = []

    def submit() -> SteadyJob:
        template = host_pod(schedulerName="nobody")
        settings = kube.settings(spaces[0], tmp_path / "jobs")
        cluster = KubeCluster(kube.api, settings, namespace=spaces[0], user_pod=lambda: template)
        made.append(SteadyJob(cluster, spaces[0]))
        return made[-1]

    yield submit
    for space in spaces:
        for job in made:
            with suppress(UnknownJob):
                kube.api.delete(pod_path(space, job.id), grace_s=0)


@pytest.fixture
def scheduler(kube: TestKube, spaces: tuple[str, str], tmp_path: Path) -> KubeCluster:
    return KubeCluster(kube.api, kube.settings(spaces[0], tmp_path / "jobs"))


def scribble(job: SteadyJob, *, labels: dict[str, Any] | None = None, **texts: str | None) -> None:
    """Set annotations of the job's pod, or take them away, by their names behind our prefix."""
    notes = {doc.PREFIX + name: text for name, text in texts.items()}
    body = {"metadata": {"annotations": notes, "labels": labels or {}}}
    job.cluster.api.patch(pod_path(job.space, job.id), body)


def cycle(scheduler: KubeCluster, *jobs: SteadyJob) -> int:
    """Give each of the jobs an empty allocation, as a cycle does; the number of the decision."""
    with scheduler.lease("cycle", LEASE):
        number = scheduler.next_decision()
        there = {job.job_id: job for job in scheduler.observe().jobs}
        for job in jobs:
            scheduler.patch_allocation(
                job.id,
                expected=there[job.id].allocation.decision,
                allocation=Allocation(decision=number, reason="test"),
            )
    for job in jobs:
        assert job.now.allocation == Allocation(decision=number, reason="test")
    return number


def lease_says(scheduler: KubeCluster, space: str, text: str | None = None) -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases/{NAME}"
    if text is not None:
        scheduler.api.patch(path, {"metadata": {"annotations": {doc.DECISION: text}}})
    return doc.annotations(scheduler.api.get(path))[doc.DECISION]


@pytest.mark.parametrize("text", ["1e21", "999999999999999999999", "9007199254740992", "-3", "\u00b2", ""])
def test_a_lease_that_holds_nonsense_goes_on_above_the_jobs_and_says_so(
    scheduler: KubeCluster,
    submit: Callable[[], SteadyJob],
    spaces: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
    text: str,
) -> None:
    job = submit()
    before = cycle(scheduler, job)
    lease_says(scheduler, spaces[0], text)
    assert cycle(scheduler, job) == before + 1
    assert lease_says(scheduler, spaces[0]) == str(before + 1)
    assert bool(text) == any(NAME in message for message in caplog.messages)


@pytest.mark.parametrize("text", GARBAGE)
@pytest.mark.parametrize("names", [("decision",), ("allocation",), ("decision", "allocation")])
def test_a_number_or_an_allocation_that_nobody_gave_costs_no_other_job_a_cycle_and_is_mended(
    scheduler: KubeCluster, submit: Callable[[], SteadyJob], names: tuple[str, ...], text: str | None
) -> None:
    job, other = submit(), submit()
    before = cycle(scheduler, job, other)
    scribble(job, **dict.fromkeys(names, text))
    assert cycle(scheduler, job, other) == before + 1


def test_a_driver_pod_in_a_namespace_of_somebody_else_moves_no_number_and_takes_no_jobs_place(
    kube: TestKube, scheduler: KubeCluster, submit: Callable[[], SteadyJob], spaces: tuple[str, str]
) -> None:
    job = submit()
    before = cycle(scheduler, job)
    real = kube.api.get(pod_path(spaces[0], job.id))
    time.sleep(1.1)  # the older of two pods counts, and the API server tells whole seconds
    forgeries = {job.id: 9007199254740000, "elsewhere-1": 9007199254740000, "elsewhere-2": 10**21}
    for name, number in forgeries.items():
        notes = doc.annotations(real) | {
            doc.DECISION: str(number),
            doc.ALLOCATION: f'{{"decision":{number}}}',
        }
        labels = {**doc.labels(real), doc.JOB: name}
        meta = {"name": name, "labels": labels, "annotations": notes}
        kube.api.create(pod_path(spaces[1]), {"metadata": meta, "spec": host_pod(schedulerName="no")["spec"]})
    try:
        assert cycle(scheduler, job) == before + 1
        for name in ("elsewhere-1", "elsewhere-2"):
            pod = kube.api.get(pod_path(spaces[1], name))
            assert doc.annotations(pod)[doc.DECISION] == str(before + 1)
    finally:
        for name in ("elsewhere-1", "elsewhere-2"):
            kube.api.delete(pod_path(spaces[1], name), grace_s=0)


@pytest.mark.parametrize(
    ("scribbled", "labels"),
    [
        pytest.param({"spec": "[]"}, {}, id="spec"),
        pytest.param({"identity": None}, {}, id="identity"),
        pytest.param({"spec": "{garbage", "identity": "{garbage", "allocation": "{garbage"}, {}, id="all"),
        pytest.param({}, {doc.ROLE: None}, id="role"),
        pytest.param({}, {doc.JOB: "other"}, id="job"),
    ],
)
def test_a_job_that_is_not_to_be_known_is_left_out_and_its_submission_puts_it_right(
    scheduler: KubeCluster,
    submit: Callable[[], SteadyJob],
    scribbled: dict[str, str | None],
    labels: dict[str, str | None],
) -> None:
    job, other = submit(), submit()
    cycle(scheduler, job, other)
    scribble(job, labels=labels, **scribbled)
    cycle(scheduler, other)
    assert job.id not in {there.job_id for there in scheduler.every_job().jobs}
    with pytest.raises(DriverLost if scribbled else UnknownJob):
        _ = job.now
    assert job.submit().spec == job.spec
    cycle(scheduler, job, other)


def test_a_job_that_is_not_to_be_known_can_be_stopped(submit: Callable[[], SteadyJob]) -> None:
    job = submit()
    scribble(job, spec="[]", stop="whenever")
    with pytest.raises(DriverLost):
        job.cluster.stop(job.id, "failed")
    scribble(job, spec=encode(job.spec))
    assert job.now.status.stop == "failed"


@pytest.mark.parametrize("text", [None, "", "whenever", "{garbage"])
def test_a_request_to_stop_gets_through_whatever_stood_there(
    submit: Callable[[], SteadyJob], text: str | None
) -> None:
    job = submit()
    scribble(job, stop=text)
    assert job.now.status.stop is None
    assert job.cluster.stop(job.id, "clear").status.stop == "clear"


def test_a_run_that_is_none_of_mlflows_gives_way_to_the_jobs_own(submit: Callable[[], SteadyJob]) -> None:
    job = submit()
    scribble(job, run="../../else")
    job.cluster.set_run(job.id, "run-1")
    assert job.now.mlflow_run_id == "run-1"


def test_a_pod_that_is_no_jobs_is_not_taken_for_one(kube: TestKube, submit: Callable[[], SteadyJob]) -> None:
    job = submit()
    kube.api.delete(pod_path(job.space, job.id), grace_s=0)
    kube.api.create(pod_path(job.space), {"metadata": {"name": job.id}, "spec": host_pod()["spec"]})
    with pytest.raises(Refused, match="no job's driver; remove it"):
        job.submit()
