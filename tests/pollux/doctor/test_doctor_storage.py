"""What the doctor says of pods that could not try the storage: the cause, and a fix for that cause."""

from typing import Any

import pytest
from fake_kube import FakeKube

from pollux.cluster.k8s import KubeSettings
from pollux.cluster.k8s.manifest import driver_pod
from pollux.doctor import storage
from pollux.doctor.finding import Finding
from pollux.doctor.storage import check_storage
from pollux_agent.driver.kube.api import KubeError, pod_path
from pollux_agent.driver.kube.documents import JOB_DIR

SETTINGS = KubeSettings(namespace="team", jobs_volume={"nfs": {"server": "nas", "path": "/jobs"}})
TEMPLATE = {
    "spec": {"containers": [{"name": "base", "image": "train:1", "securityContext": {"runAsUser": 1}}]}
}


class Kubelet(FakeKube):
    """Every pod becomes what ``status`` says, and printed ``output``; nothing can be read of one that has
    none."""

    def __init__(self, status: dict[str, Any], output: str | None) -> None:
        super().__init__()
        self.output = output
        self.made: list[dict[str, Any]] = []
        self.status = status

    def create(self, path: str, body: Any, **query: Any) -> dict[str, Any]:
        pod = super().create(path, {**body, "status": self.status})
        pod["spec"]["nodeName"] = "node-0"
        self.objects[pod_path("team", pod["metadata"]["name"])] = pod
        self.made.append(pod)
        return pod

    def text(self, path: str, *, read_s: float | None = None, **query: Any) -> bytes:
        if self.output is None:
            raise KubeError(f"GET {path}: container is waiting to start", 400, "BadRequest")
        return self.output.encode()


def ended(**state: Any) -> dict[str, Any]:
    end = {"exitCode": 1, "reason": "Error", **state}
    return {"phase": "Failed", "containerStatuses": [{"name": "doctor", "state": {"terminated": end}}]}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "doctor", "state": state}]}


def look(kubelet: Kubelet) -> list[Finding]:
    return list(check_storage(kubelet, SETTINGS, "team", TEMPLATE))


NO_PYTHON = 'exec: "python": executable file not found in $PATH'
DENIED = "Traceback (most recent call last):\n  ...\nPermissionError: [Errno 13] Permission denied: '/pollux'"


@pytest.mark.parametrize(
    ("status", "output", "said", "fix"),
    [
        pytest.param(
            ended(exitCode=128, reason="StartError", message=NO_PYTHON), "", NO_PYTHON, "POLLUX_KUBE_PYTHON",
            id="no Python in the image",
        ),
        pytest.param(
            ended(exitCode=127, reason="ContainerCannotRun", message=NO_PYTHON), None, NO_PYTHON,
            "POLLUX_KUBE_PYTHON", id="as older runtimes say it",
        ),
        pytest.param(
            waiting("CreateContainerError", NO_PYTHON), None, NO_PYTHON, "POLLUX_KUBE_PYTHON",
            id="as others say it",
        ),
        pytest.param(ended(), DENIED, "Permission denied", "chmod", id="a folder that it may not write"),
        pytest.param(
            ended(), "FileNotFoundError: [Errno 2] No such file", "No such file", "ReadWriteMany",
            id="a volume of its own",
        ),
        pytest.param(
            waiting("ImagePullBackOff", "no such image"), None, "no such image", "imagePullSecrets",
            id="no image",
        ),
        pytest.param(
            waiting("CreateContainerConfigError", "failed to create subPath directory for volumeMount"), None,
            "subPath", "no_root_squash", id="a volume in which the kubelet may make no folder",
        ),
        pytest.param(
            waiting("CreateContainerConfigError", "container has runAsNonRoot, image runs as root"), None,
            "runAsNonRoot", "--pod", id="a user that may not be",
        ),
        pytest.param(
            {"phase": "Failed", "reason": "Evicted", "message": "disk"}, "", "Evicted", "again", id="evicted"
        ),
        pytest.param(waiting("ContainerCreating"), None, "ContainerCreating", "ReadWriteMany", id="no mount"),
        pytest.param(
            {
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}],
            },
            None, "0/2 nodes", "tolerations", id="no node",
        ),
    ],
)  # fmt: skip
def test_a_pod_that_fails_is_told_with_its_cause_and_a_fix_for_that(
    status: dict[str, Any], output: str | None, said: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "WAIT_S", 0.0)
    (found,) = look(Kubelet(status, output))
    assert found.status == "failed"
    assert said in found.detail
    assert fix in found.fix
    assert ("ReadWriteMany" in found.fix) == (fix == "ReadWriteMany")


def test_the_pods_have_the_mount_of_a_job_and_the_first_one_a_drivers_confinement() -> None:
    kubelet = Kubelet({"phase": "Succeeded"}, "1700000000.0")
    assert [finding.status for finding in look(kubelet)] == ["ok", "ok"]
    driver = driver_pod(
        TEMPLATE, job_id="job", namespace="team", notes={}, deployment="airflow", settings=SETTINGS
    )
    (job,) = (m for m in driver["spec"]["containers"][0]["volumeMounts"] if m["mountPath"] == JOB_DIR)
    for pod in kubelet.made:
        container = pod["spec"]["containers"][0]
        (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == JOB_DIR)
        assert set(mount) == set(job)
        assert mount["subPath"].startswith("pollux-doctor-")
    writer, reader = (pod["spec"]["containers"][0] for pod in kubelet.made)
    assert writer["securityContext"] == driver["spec"]["containers"][0]["securityContext"]
    assert reader["securityContext"] == {"runAsUser": 1}
    assert not [path for path in kubelet.objects if "/pods/" in path], "they are removed again"
