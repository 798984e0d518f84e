"""The demo's view of jobs on Kubernetes, and what it needs to be told before it makes anything."""

from pathlib import Path

import pytest

import pollux
import pollux_agent
from pollux.cluster.base import ClusterJob, JobIdentity, JobStatus
from pollux.demo.kube import KubeChoice
from pollux.demo.kube.jobs import WatchedJobs
from pollux.demo.kube.pod import host_pod
from pollux.errors import ConfigError, UnknownJob
from pollux_agent.driver.state import DriverState
from pollux_agent.protocol import JobSpec, decode, encode

JOB = ClusterJob(
    job_id="digits-1",
    identity=JobIdentity(deployment="airflow", dag_id="train", run_id="r", task_id="t"),
    spec=JobSpec(name="digits", script="digits.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=2),
    submitted_unix_s=1.0,
    mlflow_run_id="run",
    status=JobStatus(phase="running", incarnation=2, held={"node-0": 1}),
)


class Pods:
    """A cluster whose pods a test takes away."""

    def __init__(self) -> None:
        self.found: ClusterJob | None = None

    def job(self, job_id: str) -> ClusterJob:
        if self.found is None:
            raise UnknownJob(job_id)
        return self.found


def stored(jobs: Path) -> ClusterJob:
    return decode(ClusterJob, (jobs / JOB.job_id / "job.json").read_bytes())


def test_a_job_without_a_pod_so_far_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownJob):
        WatchedJobs(Pods(), tmp_path).job(JOB.job_id)
    assert list(tmp_path.iterdir()) == []


def test_what_is_seen_is_stored_for_the_checks(tmp_path: Path) -> None:
    pods = Pods()
    pods.found = JOB
    assert WatchedJobs(pods, tmp_path).job(JOB.job_id) == stored(tmp_path) == JOB


def test_once_its_pod_is_gone_a_job_is_what_its_driver_left(tmp_path: Path) -> None:
    pods = Pods()
    pods.found = JOB
    jobs = WatchedJobs(pods, tmp_path)
    jobs.job(JOB.job_id)
    left = DriverState(phase="done", incarnation=3, acted_decision=7, final=True, message="complete")
    (tmp_path / JOB.job_id / "driver.json").write_text(encode(left))
    pods.found = None
    job = jobs.job(JOB.job_id)
    assert (job.status.phase, job.status.incarnation, job.status.restarts) == ("done", 3, 2)
    assert (job.status.held, job.mlflow_run_id) == ({}, "run")
    assert jobs.job(JOB.job_id) == stored(tmp_path) == job


def test_without_a_file_of_its_driver_a_job_stays_as_it_was_seen(tmp_path: Path) -> None:
    pods = Pods()
    pods.found = JOB
    jobs = WatchedJobs(pods, tmp_path)
    jobs.job(JOB.job_id)
    pods.found = None
    assert jobs.job(JOB.job_id) == JOB


def test_without_a_cluster_the_demo_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"set KUBECONFIG .* or POLLUX_KUBE"):
        KubeChoice().check()


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        (KubeChoice(kubeconfig=Path("/nowhere/config"), scripts=Path("/usr")), "KUBECONFIG: /nowhere/config"),
        (KubeChoice(scripts=Path("/usr")), "POLLUX_KUBE: /usr"),
    ],
)
def test_a_cluster_that_is_not_there_is_named(choice: KubeChoice, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        choice.check()


def test_each_folder_that_a_worker_needs_is_mounted_once_and_read_only(tmp_path: Path) -> None:
    inner = tmp_path / "examples"
    inner.mkdir()
    pod = host_pod(0.375, working_dir=inner, folders=[tmp_path])
    (container,) = pod["spec"]["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert str(tmp_path.resolve()) in mounts
    assert not any(path != other and path.startswith(f"{other}/") for path in mounts for other in mounts), (
        mounts
    )
    packages = [str(Path(package.__file__).resolve().parent) for package in (pollux, pollux_agent)]
    assert all(any(path.startswith(mount) for mount in mounts) for path in packages)
    assert all(mount["readOnly"] for mount in mounts.values())
    assert {volume["hostPath"]["path"] for volume in pod["spec"]["volumes"]} == set(mounts)
    assert {"name": "POLLUX_SLOT_SHARE", "value": "0.375"} in container["env"]
