"""An image and a pod for a training that is not root, on real nodes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from kube_nodes import TestKube, host_pod

USER = 50_000
IMAGE = "localhost/open:1"
"""As localhost/host:1, whose folders are root's alone."""


@pytest.fixture(scope="module")
def image(kube: TestKube, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An empty system for any user, whose /usr is mounted from this machine."""
    kube.node_up("node-0", 4)
    root = tmp_path_factory.mktemp("image")
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
