"""A Kubernetes for tests: the one that KUBECONFIG names, or one that the scripts in POLLUX_KUBE start."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

import pytest

from pollux.cluster.k8s import KubeCluster, KubeSettings
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import KubeApi, KubeError, open_api, pod_path

T = TypeVar("T")
TOP = Path(__file__).resolve().parents[2]
NODE_GRACE = "25s"
GPU = "nvidia.com/gpu"
DRIVER_ACCOUNT = "pollux-driver"
PREFIX, MADE_BY = "pollux-test-", "pollux.dev/made-by"
"""Of the namespaces that tests make: their names, and a label."""

_SCRIPT_S = 240


def awaited(look: Callable[[], T], wanted: Callable[[T], Any] = bool, timeout_s: float = 180.0) -> T:
    """Look until what is seen is as wanted."""
    until_s = time.monotonic() + timeout_s
    while not wanted(seen := look()):
        assert time.monotonic() < until_s, f"did not come about; last seen: {seen}"
        time.sleep(0.1)
    return seen


@dataclass(slots=True)
class TestKube:
    """``scripts`` is None where a cluster of somebody else's is used; then there are fake nodes only."""

    __test__ = False

    kubeconfig: Path
    folder: Path
    scripts: Path | None
    state: Path | None
    made: list[str] = field(default_factory=list)
    """The namespaces that the tests made."""

    @property
    def api(self) -> KubeApi:
        return open_api(self.kubeconfig)

    def leftovers(self) -> list[str]:
        """Namespaces of tests before us, which were killed."""
        found = self.api.items("/api/v1/namespaces", labelSelector=MADE_BY)
        return [item["metadata"]["name"] for item in found]

    def remove_made(self) -> None:
        """Remove the namespaces, whatever became of the tests."""
        for name in self.made:
            self.api.delete(f"/api/v1/namespaces/{name}")

    def node_up(self, name: str, gpus: int) -> None:
        """A real node, or a new number of GPUs for one that is up."""
        self._run("node-up.sh", name, str(gpus))

    def node_down(self, name: str, *, crash: bool = False) -> None:
        self._run("node-down.sh", *(["--crash"] if crash else []), name)

    def image(self, name: str, root: Path) -> None:
        """An image of what is in a folder, on every node that is up."""
        self._run("node-image.sh", name, str(root))

    @contextmanager
    def cut_off(self, name: str) -> Iterator[None]:
        """As if the network to a node were cut: its kubelet is silent and deaf, its pods go on."""
        if self.state is None:
            pytest.skip("needs kube: only nodes that the tests started can be cut off")
        (kubelet,) = processes("/kubelet", f"{self.state}/nodes/{name}/etc/kubelet.yaml")
        os.kill(kubelet, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(kubelet, signal.SIGCONT)

    def _run(self, script: str, *arguments: str) -> None:
        if self.scripts is None or self.state is None:
            pytest.skip("needs kube: real nodes come from POLLUX_KUBE's node-up.sh")
        run_script(self.scripts / script, *arguments, state=self.state)

    def bare_namespace(self, name: str) -> str:
        """An empty namespace, with our mark and a name that nobody else has: none is in its way."""
        assert name.startswith(PREFIX), name
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": {MADE_BY: "tests"}}})
        self.made.append(name)
        return name

    def namespace(self, name: str) -> str:
        """As :meth:`bare_namespace`, with a service account that may do what a driver does, and no more."""
        api = self.api
        self.bare_namespace(name)
        accounts = f"/api/v1/namespaces/{name}/serviceaccounts"
        roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{name}"
        api.create(accounts, {"metadata": {"name": DRIVER_ACCOUNT}})
        verbs = ["get", "list", "watch", "create", "patch", "delete"]
        rules = [
            {"apiGroups": [""], "resources": ["pods"], "verbs": verbs},
            {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
        ]
        api.create(f"{roles}/roles", {"metadata": {"name": DRIVER_ACCOUNT}, "rules": rules})
        binding = {
            "metadata": {"name": DRIVER_ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": DRIVER_ACCOUNT, "namespace": name}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": DRIVER_ACCOUNT},
        }
        api.create(f"{roles}/rolebindings", binding)
        for account in ("default", DRIVER_ACCOUNT):
            awaited(lambda account=account: has_token(api, f"{accounts}/{account}"))
        return name

    def settings(self, namespace: str, jobs: Path, **fields: Any) -> KubeSettings:
        """Settings under which this machine's own Python runs drivers and workers."""
        server = urlparse(self.api.client.configuration.host)
        plain: dict[str, Any] = {
            "config": self.kubeconfig,
            "namespace": namespace,
            "jobs_volume": {"hostPath": {"path": str(jobs), "type": "DirectoryOrCreate"}},
            "driver_service_account": DRIVER_ACCOUNT,
            "driver_env": {
                "KUBERNETES_SERVICE_HOST": server.hostname,
                "KUBERNETES_SERVICE_PORT": str(server.port),
            },
            "python": sys.executable,
            "grace_s": 10.0,
            "report_interval_s": 2.0,
            "checkpoint_interval_s": 2.0,
            "place_wait_s": 20.0,
        }
        return KubeSettings(**(plain | fields))

    def cluster(self, settings: KubeSettings, **pod: Any) -> KubeCluster:
        return KubeCluster(self.api, settings, namespace=settings.namespace, user_pod=lambda: host_pod(**pod))


def processes(program: str, *words: str) -> list[int]:
    """Ids of processes on this machine, its nodes' included, whose program ends so and among whose arguments
    and variables are all of the words.
    """
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else [b""]
            text = command + (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if command[0].endswith(program.encode()) and all(word.encode() in text for word in words):
            found.append(int(entry.name))
    return found


def host_folders(*more: Path) -> list[str]:
    """What a pod needs of this machine to run this Python, outermost folders only."""
    wanted = sorted({os.path.realpath(path) for path in ("/usr", sys.base_prefix, sys.prefix, TOP, *more)})
    found: list[str] = []
    for path in wanted:
        if not any(path == outer or path.startswith(f"{outer}/") for outer in found):
            found.append(path)
    return found


def host_pod(*folders: Path, **spec: Any) -> dict[str, Any]:
    """A user's pod that runs this machine's own Python; the folders are mounted read-only."""
    paths = host_folders(*folders)
    return {
        "metadata": {"labels": {"team": "research"}},
        "spec": {
            "hostNetwork": True,
            "containers": [
                {
                    "name": "base",
                    "image": "localhost/host:1",
                    "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
                    "volumeMounts": [
                        {"name": f"host-{number}", "mountPath": path, "readOnly": True}
                        for number, path in enumerate(paths)
                    ],
                }
            ],
            "volumes": [
                {"name": f"host-{number}", "hostPath": {"path": path}} for number, path in enumerate(paths)
            ],
            **spec,
        },
    }


def run_script(script: Path, *arguments: str, state: Path) -> str:
    """Run one of the cluster's scripts; its last arguments are the node's and the state folder."""
    done = subprocess.run(
        [str(script), *arguments, str(state)],
        capture_output=True,
        text=True,
        check=False,
        timeout=_SCRIPT_S,
        env={**os.environ, "KUBE_NODE_GRACE": NODE_GRACE},
    )
    assert done.returncode == 0, f"{script.name} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}"
    return done.stdout.strip()


def story(api: KubeApi) -> str:
    """Every job pod in a line, and what each driver said last."""
    lines = []
    for pod in api.items("/api/v1/pods", labelSelector=doc.JOB):
        meta, status = pod["metadata"], pod.get("status") or {}
        path = pod_path(meta["namespace"], meta["name"], "log")
        ended = meta.get("deletionTimestamp", "")
        lines.append(
            f"{meta['name']} {status.get('phase')} {status.get('reason', '')} {ended} "
            f"on {pod['spec'].get('nodeName')}"
        )
        if doc.labels(pod).get(doc.ROLE) == doc.DRIVER_ROLE:
            lines.append(f"  allocation {doc.annotations(pod).get(doc.ALLOCATION)}")
            lines.append(f"  state {doc.annotations(pod).get(doc.STATE, '')[:600]}")
            try:
                text = api.text(path, tailLines=40, timestamps="true").decode(errors="replace")
            except KubeError as error:
                text = str(error)
            lines += [f"  | {line}" for line in text.splitlines()]
    return "\n".join(lines)


def fake_node(api: KubeApi, name: str, gpus: int, **meta: Any) -> None:
    """A node without a kubelet: enough to count and to schedule, but nothing runs there."""
    body = {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}, **meta}}
    api.create("/api/v1/nodes", body)
    sizes = {"cpu": "64", "memory": "512Gi", "pods": "250", GPU: str(gpus)}
    status = {
        "capacity": sizes,
        "allocatable": sizes,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Fake", "message": "a test's"}],
    }
    api.patch(f"/api/v1/nodes/{name}/status", {"status": status})


def has_token(api: KubeApi, path: str) -> bool:
    """Servers before 1.24 refuse pods of an account that has no token yet; later ones make no secret."""
    try:
        version = api.get("/version")
        if int(json.dumps(version["minor"]).strip('"+')) >= 24:
            return True
        return bool(api.get(path).get("secrets"))
    except KubeError:
        return False
