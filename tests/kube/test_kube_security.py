"""What user code may not do, tried by a training on a real node."""

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from kube_jobs import SteadyJob
from kube_nodes import TestKube, awaited, host_pod

from pollux.cluster.k8s import KubeCluster
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import pod_path

pytestmark = [pytest.mark.needs("kube"), pytest.mark.timeout(600)]

USER = 50_000
PRYING = Path(__file__).with_name("prying_training.py")
MADE = "made-by-a-shell"
GIVEN = "$(touch {0}) `touch {0}`; touch {0} & touch {0} | $HOME ${{HOME}} $(HOME) $$(HOME) $$ %s '\" \\ *"
"""Makes a file wherever a shell sees it, and changes where the kubelet does."""


IMAGE = "localhost/open:1"
"""As localhost/host:1, whose folders are root's alone."""


@pytest.fixture
def image(kube: TestKube, tmp_path: Path) -> str:
    """An empty system for any user, whose /usr is mounted from this machine."""
    kube.node_up("node-0", 4)
    (root := tmp_path / "root").mkdir()
    for name in ("usr", "etc", "root", "var", "opt", "home", "run", "tmp"):
        (root / name).mkdir()
    for name in ("bin", "sbin", "lib", "lib64", "lib32"):
        if (link := Path("/", name)).is_symlink():
            (root / name).symlink_to(link.readlink())
    shutil.copy("/etc/ld.so.cache", root / "etc" / "ld.so.cache")
    for path in (root, *root.iterdir()):
        if not path.is_symlink():
            path.chmod(0o755)
    kube.image(IMAGE, root)
    return IMAGE


def guarded_pod() -> dict[str, Any]:
    """As the chart's pod of trainings: no root, nothing to write but /tmp, no rights of the kernel's."""
    pod = host_pod(securityContext={"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER})
    (container,) = pod["spec"]["containers"]
    container["image"] = IMAGE
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    container["env"] = [{"name": "HOME", "value": "/tmp"}]
    container["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"})
    pod["spec"]["volumes"].append({"name": "tmp", "emptyDir": {}})
    return pod


def test_a_training_without_root_trains_and_comes_at_nothing_that_is_not_its_own(
    kube: TestKube, image: str, tmp_path: Path
) -> None:
    space = kube.namespace("security")
    (jobs := tmp_path / "jobs").mkdir()
    jobs.chmod(0o777)
    cluster = KubeCluster(kube.api, kube.settings(space, jobs), namespace=space, user_pod=guarded_pod)
    other = SteadyJob(cluster, space)
    (secret := awaited(lambda: jobs / other.id, Path.is_dir, 60) / "secret").touch()
    server = urlparse(kube.api.client.configuration.host)
    address = f"https://{server.hostname}:{server.port}"
    wanted = {
        "urls": [
            ("GET", f"{address}{pod_path(space)}"),
            ("GET", f"{address}{pod_path(space, other.id)}"),
            ("GET", f"{address}{pod_path(space, other.id, 'log')}"),
            ("PATCH", f"{address}{pod_path(space, other.id)}"),
            ("DELETE", f"{address}{pod_path(space, other.id)}"),
            ("GET", f"{address}/api/v1/namespaces/{space}/secrets"),
        ],
        "folders": [str(secret), f"{doc.JOB_DIR}/../{other.id}", f"{doc.JOB_DIR}/{other.id}"],
        "files": ["/written", "/usr/written", "/etc/passwd", f"{doc.JOB_DIR}/../written", "/tmp/written"],
    }
    given = GIVEN.format(f"{doc.JOB_DIR}/{MADE}")
    job = SteadyJob(
        cluster,
        space,
        script=str(PRYING),
        arguments=["--steps", "5", given],
        env={"PRY": json.dumps(wanted), "GIVEN": given},
    )
    try:
        job.give({"node-0": 1})
        done = awaited(lambda: job.now.status, lambda status: status.phase in ("done", "failed"), 120)
        assert done.phase == "done", done
        pried = json.loads((jobs / job.id / "pried.json").read_text())
        assert pried["user"] == USER
        assert (pried["argument"], pried["variable"]) == (given, given)
        assert not (jobs / job.id / MADE).exists()
        assert set(pried["statuses"]) <= {401, 403}, pried["statuses"]
        assert (pried["secrets"], pried["folders"]) == ([], [])
        assert pried["written"] == ["/tmp/written"], "the one place where it may"
        assert {path.stat().st_uid for path in (jobs / job.id).iterdir()} == {USER}
        assert "pried" not in doc.labels(kube.api.get(pod_path(space, other.id)))
    finally:
        job.ask_to_end()
        other.ask_to_end()
        job.end()
        other.end()
