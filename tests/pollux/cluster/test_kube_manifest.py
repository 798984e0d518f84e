"""The driver's pod and the workers' template: ours is small and ours alone, theirs is as the user gave it."""

import json
from typing import Any, cast

import pytest

from pollux.cluster.base import JobIdentity
from pollux.cluster.k8s.jobs import job_of, left_by
from pollux.cluster.k8s.manifest import driver_pod, first_notes
from pollux.cluster.k8s.settings import KubeSettings, kube_settings
from pollux.errors import ConfigError, Refused
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.state import DriverState, Phase
from pollux_agent.protocol import JobSpec, encode

SPEC = JobSpec(
    name="digits",
    script="digits.py",
    initial_batch_size=8,
    max_local_batch_size=8,
    max_gpus=2,
    env={"A": "b"},
)
IDENTITY = JobIdentity(deployment="airflow", dag_id="d", run_id="r", task_id="t")
CLAIM = {"persistentVolumeClaim": {"claimName": "jobs"}}
SETTINGS = KubeSettings(jobs_volume=CLAIM, driver_image="pollux/driver:1", driver_service_account="driver")


def user_pod(**spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "labels": {"team": "x", "dag_id": "d", "kubernetes_pod_operator": "True", doc.FINISH: "keep_pod"},
            "annotations": {"note": "mine"},
        },
        "spec": {
            "containers": [
                {"name": "sidecar", "image": "side:1"},
                {
                    "name": "base",
                    "image": "train:1",
                    "env": [{"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                    "resources": {"limits": {"nvidia.com/gpu": "8", "memory": "64Gi"}},
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
            ],
            "volumes": [{"name": "data", "emptyDir": {}}],
            "nodeSelector": {"gpu": "yes"},
            "serviceAccountName": "users-own",
            "imagePullSecrets": [{"name": "pull"}],
            "priorityClassName": "high",
            "activeDeadlineSeconds": 60,
            **spec,
        },
    }


def made(settings: KubeSettings = SETTINGS, **pod: Any) -> dict[str, Any]:
    notes = first_notes(
        identity=IDENTITY,
        spec=SPEC,
        run_id=None,
        submitted_unix_s=12.5,
        decision=3,
        try_number=2,
        fresh=False,
        state=None,
        settings=settings,
        mlflow_tracking_uri="http://mlflow:5000",
    )
    return driver_pod(
        user_pod(**pod),
        job_id="digits-1",
        namespace="team",
        notes=notes,
        deployment="airflow",
        settings=settings,
    )


def test_the_driver_runs_our_code_only_and_holds_no_gpu() -> None:
    pod = made()
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "pollux/driver:1"
    assert container["command"][1:] == ["-m", "pollux_agent.cli", "drive"]
    assert "nvidia.com/gpu" not in json.dumps(container["resources"])
    assert "SECRET" not in json.dumps(container["env"])
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["pollux-job", "pollux-tmp"]
    assert pod["spec"]["serviceAccountName"] == "driver"
    assert "nodeSelector" not in pod["spec"]


def test_pull_secrets_priority_and_deadline_are_the_jobs() -> None:
    spec = made()["spec"]
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert (spec["priorityClassName"], spec["activeDeadlineSeconds"]) == ("high", 60)


def test_workers_are_made_from_the_users_pod_without_the_operators_labels() -> None:
    template = json.loads(made()["metadata"]["annotations"][doc.WORKER])
    assert template["metadata"]["labels"] == {"team": "x"}
    base, sidecar = template["spec"]["containers"]
    assert (base["name"], base["image"], sidecar["name"]) == ("base", "train:1", "sidecar")
    assert base["volumeMounts"][-1] == {
        "name": "pollux-job",
        "mountPath": doc.JOB_DIR,
        "subPath": "digits-1",
    }
    assert template["spec"]["nodeSelector"] == {"gpu": "yes"}
    assert "activeDeadlineSeconds" not in template["spec"]


def test_both_leave_a_lost_node_within_half_a_minute() -> None:
    pod = made()
    template = json.loads(pod["metadata"]["annotations"][doc.WORKER])
    for spec in (pod["spec"], template["spec"]):
        leaves = {item["key"]: item["tolerationSeconds"] for item in spec["tolerations"]}
        assert leaves == {"node.kubernetes.io/not-ready": 30, "node.kubernetes.io/unreachable": 30}


def test_without_an_image_of_its_own_the_driver_has_the_users_volumes() -> None:
    pod = made(KubeSettings(jobs_volume=CLAIM), hostNetwork=True)
    assert pod["spec"]["containers"][0]["image"] == "train:1"
    assert {"name": "data", "emptyDir": {}} in pod["spec"]["volumes"]
    assert pod["spec"]["hostNetwork"] is True


def test_the_annotations_are_the_job() -> None:
    job = job_of(made(), now_unix_s=100.0)
    assert (job.job_id, job.identity, job.spec) == ("digits-1", IDENTITY, SPEC)
    assert (job.submitted_unix_s, job.mlflow_run_id, job.allocation.decision) == (12.5, None, 3)
    assert (job.status.phase, job.status.try_number, job.status.stop) == ("waiting", 2, None)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(Refused, match="POLLUX_KUBE_JOBS_VOLUME"):
        made(KubeSettings(driver_image="x"))
    with pytest.raises(Refused, match="image"):
        made(containers=[{"name": "base"}])


@pytest.mark.parametrize(
    ("environ", "texts"),
    [
        ({"POLLUX_KUBE_JOBS_VOLUME": "{"}, ["POLLUX_KUBE_JOBS_VOLUME", "JSON"]),
        ({"POLLUX_KUBE_NAMESPACE": "Not A Label"}, ["namespace", "Not A Label"]),
        ({"POLLUX_KUBE_GRACE_S": "-1"}, ["grace_s", "-1"]),
        ({"POLLUX_KUBE_GPU_RESOURCES": "[]"}, ["gpu_resources"]),
    ],
)
def test_wrong_settings_name_variable_and_value(environ: dict[str, str], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        kube_settings(environ)
    assert all(text in str(raised.value) for text in texts), raised.value


def test_settings_are_read_from_their_variables() -> None:
    environ = {
        "POLLUX_KUBE_JOBS_VOLUME": json.dumps(CLAIM),
        "POLLUX_KUBE_GPU_RESOURCES": '["nvidia.com/gpu", "nvidia.com/mig-1g.5gb"]',
        "POLLUX_KUBE_PLACE_WAIT_S": "5",
    }
    found = kube_settings(environ)
    assert (found.jobs_volume, found.gpu_resources[1], found.place_wait_s) == (
        CLAIM,
        "nvidia.com/mig-1g.5gb",
        5,
    )


def test_a_folder_of_the_users_at_tmp_is_the_workers_alone() -> None:
    """The driver has its own there, and a pod with two is refused."""
    container = {"name": "base", "image": "train:1", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
    volumes = [{"name": "tmp", "emptyDir": {}}]
    pod = made(KubeSettings(jobs_volume=CLAIM), containers=[container], volumes=volumes)
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    assert [mount["name"] for mount in mounts if mount["mountPath"] == "/tmp"] == ["pollux-tmp"]
    template = json.loads(doc.annotations(pod)[doc.WORKER])
    assert container["volumeMounts"][0] in template["spec"]["containers"][0]["volumeMounts"]


def test_the_driver_has_the_users_log_in_to_mlflow_and_no_other_variable_of_theirs() -> None:
    token = {"secretKeyRef": {"name": "mlflow", "key": "token"}}
    env = [
        {"name": "MLFLOW_TRACKING_TOKEN", "valueFrom": token},
        {"name": "LD_PRELOAD", "value": "/data/theirs.so"},
    ]
    pod = made(KubeSettings(jobs_volume=CLAIM), containers=[{"name": "base", "image": "train:1", "env": env}])
    found = {part["name"]: part for part in pod["spec"]["containers"][0]["env"]}
    assert found["MLFLOW_TRACKING_TOKEN"]["valueFrom"] == token
    assert "LD_PRELOAD" not in found


@pytest.mark.parametrize(
    ("finish", "phase", "stop", "left"),
    [
        ("delete_pod", "running Failed", "", "ended"),
        ("delete_pod", "waiting Succeeded", "", "ended"),
        ("delete_pod", "done Succeeded", "", "done"),
        ("delete_succeeded_pod", "running Failed", "", None),
        ("keep_pod", "running Failed", "", None),
        ("delete_pod", "done", "", "done"),
        ("delete_pod", "failed", "", "failed"),
        ("delete_pod", "waiting", "failed", "ended"),
        ("delete_pod", "running", "", None),
        ("delete_succeeded_pod", "done", "", "done"),
        ("delete_succeeded_pod", "failed", "", None),
        ("delete_succeeded_pod", "waiting", "failed", None),
        ("keep_pod", "done", "", None),
        ("", "done", "", None),
    ],
)
def test_a_pod_is_left_by_a_job_that_is_over_unless_it_was_to_stay(
    finish: str, phase: str, stop: str, left: str | None
) -> None:
    """``phase`` is the job's, and the pod's where the driver has ended."""
    pod = made()
    phase, _, ended = phase.partition(" ")
    pod["status"] = {"phase": ended or "Running"}
    pod["metadata"]["labels"] |= {doc.FINISH: finish}
    if not finish:
        del pod["metadata"]["labels"][doc.FINISH]
    pod["metadata"]["annotations"] |= {
        doc.STATE: encode(DriverState(phase=cast(Phase, phase))),
        doc.STOP: stop,
    }
    job = left_by(pod, 100.0)
    assert (job.status.phase if job else None) == left
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert left_by(pod, 100.0) is None
