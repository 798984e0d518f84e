"""A submission: how old the job is, and what becomes of it where its name is taken."""

import time
from typing import Any

import pytest
from fake_kube import FakeKube

from pollux.cluster.base import ClusterJob, JobIdentity
from pollux.cluster.k8s import KubeCluster, KubeSettings
from pollux.errors import Refused
from pollux_agent.driver.kube.api import KubeError, pod_path
from pollux_agent.protocol import JobSpec

SPEC = JobSpec(name="digits", script="digits.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=2)
OURS = JobIdentity(deployment="airflow", dag_id="d", run_id="r", task_id="t")
ANOTHER = JobIdentity(deployment="airflow", dag_id="d", run_id="r", task_id="another")
PATH = pod_path("team", "job")


def submit(api: FakeKube, identity: JobIdentity = OURS) -> ClusterJob:
    settings = KubeSettings(namespace="team", jobs_volume={"emptyDir": {}})
    pod: dict[str, Any] = {"spec": {"containers": [{"name": "base", "image": "train:1"}]}}
    cluster = KubeCluster(api, settings, namespace="team", user_pod=lambda: pod)
    return cluster.submit("job", identity=identity, spec=SPEC, run_id=None)


def meanwhile(api: FakeKube, pod: dict[str, Any]) -> None:
    """Somebody else creates ``pod`` between our look and our create."""

    def before(method: str, path: str) -> None:
        if method == "POST" and path == pod_path("team"):
            api.objects[PATH] = pod

    api.before = before


def driver_of(identity: JobIdentity) -> dict[str, Any]:
    api = FakeKube()
    submit(api, identity)
    return api.objects[PATH]


def test_a_job_that_is_told_of_before_the_server_told_its_time_is_as_old_as_it_is() -> None:
    api = FakeKube()
    api.server_unix_s = 0.0
    before_unix_s = time.time()
    assert before_unix_s <= submit(api).submitted_unix_s <= time.time()


def test_where_the_clocks_differ_the_servers_counts() -> None:
    api = FakeKube()
    assert submit(api).submitted_unix_s == api.server_unix_s


def test_a_driver_of_ours_that_came_between_is_the_jobs() -> None:
    """As where the answer to our own create was lost."""
    api = FakeKube()
    pod = driver_of(OURS)
    meanwhile(api, pod)
    assert submit(api).identity == OURS
    assert api.objects[PATH] == pod


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        pytest.param(driver_of(ANOTHER), "another task", id="another task's driver"),
        pytest.param({"metadata": {"name": "job"}, "spec": {}}, "no job's driver", id="no driver at all"),
    ],
)
def test_a_pod_of_somebody_else_that_came_between_is_refused_and_stays(
    pod: dict[str, Any], said: str
) -> None:
    api = FakeKube()
    meanwhile(api, pod)
    with pytest.raises(Refused, match=said):
        submit(api)
    assert api.objects[PATH] == pod


def test_another_refusal_of_the_create_is_no_job_that_is_there() -> None:
    api = FakeKube()

    def before(method: str, path: str) -> None:
        if method == "POST":
            raise KubeError("POST: pods is forbidden", 403, "Forbidden")

    api.before = before
    with pytest.raises(Refused, match="forbidden"):
        submit(api)
    assert PATH not in api.objects
