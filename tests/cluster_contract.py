"""What every cluster promises; each implementation's test class inherits it and says how to make one."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol, TypeVar
from uuid import uuid4

import pytest

from pollux.cluster.base import Cluster, ClusterJob, JobControl, JobIdentity
from pollux.errors import Conflict, Refused, UnknownJob
from pollux_agent.protocol import Allocation, JobSpec

T = TypeVar("T")
NODES = {"node-0": 2, "node-1": 2}
MINUTE = timedelta(minutes=1)


class AnyCluster(Cluster, JobControl, Protocol):
    """Both protocols at once, as every implementation offers them."""


def identity(job_id: str) -> JobIdentity:
    return JobIdentity(deployment="airflow", dag_id="train", run_id=job_id, task_id="train")


def awaited(look: Callable[[], T], wanted: Callable[[T], bool], timeout_s: float = 200.0) -> T:
    """Look until what is seen is as wanted."""
    until_s = time.monotonic() + timeout_s
    while not wanted(seen := look()):
        assert time.monotonic() < until_s, f"did not come about; last seen: {seen}"
        time.sleep(0.02)
    return seen


class ClusterContract:
    """Needs fixtures ``cluster``, of two nodes with two GPUs each (NODES), and ``spec``, a job that runs on
    1 to 4 GPUs until it is stopped.
    """

    @pytest.fixture
    def submit(self, cluster: AnyCluster, spec: JobSpec) -> Iterator[Callable[..., ClusterJob]]:
        """Submit a job under a new id, or under ``job_id``; all are stopped in the end."""
        ids = set()

        def submit(job_id: str | None = None, run_id: str | None = None) -> ClusterJob:
            job_id = job_id or f"job-{uuid4().hex[:10]}"
            ids.add(job_id)
            return cluster.submit(job_id, identity=identity(job_id), spec=spec, run_id=run_id)

        yield submit
        for job_id in ids:
            cluster.stop(job_id, "failed")
        awaited(cluster.held, lambda held: not ids & held.keys())

    def give(self, cluster: AnyCluster, job_id: str, placement: dict[str, int]) -> int:
        """Allocate as a cycle does; the decision's number."""
        number = cluster.next_decision()
        cluster.patch_allocation(
            job_id,
            expected=cluster.job(job_id).allocation.decision,
            allocation=Allocation(decision=number, placement=placement, gpu_type="gpu", reason="test"),
        )
        return number

    def test_nodes_are_seen_with_their_gpus(self, cluster: AnyCluster) -> None:
        assert {node.name: node.gpus for node in cluster.observe().nodes} == NODES

    def test_a_new_job_waits_and_holds_nothing(
        self, cluster: AnyCluster, submit: Callable[..., ClusterJob], spec: JobSpec
    ) -> None:
        job = submit(run_id="run-1")
        assert (job.status.phase, job.spec, job.mlflow_run_id) == ("waiting", spec, "run-1")
        assert job.allocation.placement == {}
        assert job.job_id not in cluster.held()
        assert cluster.job(job.job_id).identity == identity(job.job_id)

    def test_jobs_are_seen_in_order_of_submission(
        self, cluster: AnyCluster, submit: Callable[..., ClusterJob]
    ) -> None:
        ids = [submit().job_id for _ in range(3)]
        assert [job.job_id for job in cluster.observe().jobs if job.job_id in ids] == ids

    def test_the_same_id_again_finds_the_active_job(
        self, cluster: AnyCluster, submit: Callable[..., ClusterJob]
    ) -> None:
        first = submit(run_id="run-1")
        again = submit(first.job_id, run_id="run-2")
        assert again.mlflow_run_id == "run-1"
        assert again.submitted_unix_s == first.submitted_unix_s
        assert again.status.try_number == 1

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda cluster: cluster.job("nobody"), id="job"),
            pytest.param(lambda cluster: cluster.stop("nobody", "failed"), id="stop"),
            pytest.param(lambda cluster: cluster.logs("nobody"), id="logs"),
            pytest.param(lambda cluster: cluster.set_run("nobody", "run"), id="set_run"),
            pytest.param(
                lambda cluster: cluster.patch_allocation(
                    "nobody", expected=0, allocation=Allocation(decision=cluster.next_decision())
                ),
                id="patch_allocation",
            ),
        ],
    )
    def test_a_job_that_does_not_exist_is_named(
        self, cluster: AnyCluster, call: Callable[[AnyCluster], object]
    ) -> None:
        with pytest.raises(UnknownJob, match="nobody"):
            call(cluster)

    def test_a_patch_that_expects_another_decision_changes_nothing(
        self, cluster: AnyCluster, submit: Callable[..., ClusterJob]
    ) -> None:
        job_id = submit().job_id
        number = self.give(cluster, job_id, {})
        with pytest.raises(Conflict):
            cluster.patch_allocation(
                job_id,
                expected=number - 1,
                allocation=Allocation(decision=cluster.next_decision(), placement={"node-0": 1}),
            )
        assert cluster.job(job_id).allocation.decision == number

    def test_a_decision_older_than_the_last_one_given_out_changes_nothing(
        self, cluster: AnyCluster, submit: Callable[..., ClusterJob]
    ) -> None:
        job_id = submit().job_id
        older = cluster.next_decision()
        cluster.next_decision()
        with pytest.raises(Conflict):
            cluster.patch_allocation(
                job_id, expected=0, allocation=Allocation(decision=older, placement={"node-0": 1})
            )
        assert cluster.job(job_id).allocation.placement == {}

    @pytest.mark.parametrize(
        "placement",
        [
            pytest.param({"node-9": 1}, id="an unknown node"),
            pytest.param({"node-0": 3}, id="more GPUs than the node has"),
        ],
    )
    def test_gpus_that_do_not_exist_are_refused(
        self, cluster: AnyCluster, submit: Callable[..., ClusterJob], placement: dict[str, int]
    ) -> None:
        job_id = submit().job_id
        with pytest.raises(Refused, match="node-"):
            self.give(cluster, job_id, placement)
        assert cluster.job(job_id).allocation.placement == {}

    def test_a_job_has_one_run_for_good(self, cluster: AnyCluster, submit: Callable[..., ClusterJob]) -> None:
        job_id = submit().job_id
        cluster.set_run(job_id, "run-1")
        cluster.set_run(job_id, "run-1")
        with pytest.raises(Conflict):
            cluster.set_run(job_id, "run-2")
        assert cluster.job(job_id).mlflow_run_id == "run-1"

    def test_decision_numbers_rise_above_any_on_a_job(
        self, cluster: AnyCluster, submit: Callable[..., ClusterJob]
    ) -> None:
        job_id = submit().job_id
        first = cluster.next_decision()
        assert cluster.next_decision() > first
        cluster.patch_allocation(job_id, expected=0, allocation=Allocation(decision=first + 1000))
        assert cluster.next_decision() > first + 1000

    def test_one_scheduler_at_a_time_holds_the_lease(self, cluster: AnyCluster) -> None:
        with cluster.lease("one", MINUTE):
            with pytest.raises(Conflict, match="one"), cluster.lease("two", MINUTE):
                pass
        with cluster.lease("two", MINUTE):
            pass

    def test_a_lease_of_a_scheduler_that_died_runs_out(self, cluster: AnyCluster) -> None:
        lost = cluster.lease("lost", timedelta(seconds=0.3))
        lost.__enter__()

        def taken() -> bool:
            try:
                with cluster.lease("next", MINUTE):
                    return True
            except Conflict:
                return False

        awaited(taken, bool, timeout_s=10)
        lost.__exit__(None, None, None)

    def test_workers_follow_the_allocation_and_never_share_a_gpu(
        self, cluster: AnyCluster, submit: Callable[..., ClusterJob]
    ) -> None:
        one, two = submit().job_id, submit().job_id
        self.give(cluster, one, NODES)
        awaited(cluster.held, lambda held: held.get(one) == NODES)
        self.give(cluster, one, {"node-0": 1})
        self.give(cluster, two, {"node-0": 1, "node-1": 2})

        def held() -> dict[str, dict[str, int]]:
            now = {job_id: dict(placement) for job_id, placement in cluster.held().items()}
            for name, gpus in NODES.items():
                assert sum(placement.get(name, 0) for placement in now.values()) <= gpus
            return now

        wanted = {one: {"node-0": 1}, two: {"node-0": 1, "node-1": 2}}
        awaited(held, lambda now: now == wanted)
        seen = {job.job_id: job for job in cluster.observe().jobs}
        assert seen[one].status.incarnation >= 2, "shrunk: workers of a later incarnation"
        assert seen[two].status.incarnation >= 1
        assert seen[one].status.attained_gpu_s > 0

    def test_a_stopped_job_gives_everything_back_and_can_be_submitted_again(
        self, cluster: AnyCluster, submit: Callable[..., ClusterJob]
    ) -> None:
        job_id = submit(run_id="run-1").job_id
        self.give(cluster, job_id, {"node-1": 1})
        awaited(cluster.held, lambda held: job_id in held)
        cluster.stop(job_id, "failed")
        ended = awaited(lambda: cluster.job(job_id), lambda job: job.status.phase == "ended")
        assert ended.allocation.placement == {}
        assert job_id not in cluster.held()
        assert job_id not in {job.job_id for job in cluster.observe().jobs}
        with pytest.raises(Refused):
            self.give(cluster, job_id, {"node-1": 1})
        again = submit(job_id)
        assert (again.status.phase, again.status.try_number) == ("waiting", 2)
        assert (again.allocation.placement, again.mlflow_run_id) == ({}, "run-1")
        assert again.allocation.decision == ended.allocation.decision
        cluster.stop(job_id, "failed")
        awaited(lambda: cluster.job(job_id), lambda job: job.status.phase == "ended")
        assert submit(job_id, run_id="run-2").mlflow_run_id == "run-2"
