"""The doctor on a real cluster: what it finds missing is what is missing, and its fix is a fix."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlparse

import pytest
import yaml
from helm_runs import CHART, run_tool
from kube_nodes import DRIVER_ACCOUNT, TestKube, awaited, host_pod
from mlflow_server import mlflow_server
from open_image import USER, guarded_pod, image

from pollux.doctor.access import check_rights
from pollux.doctor.finding import Finding
from pollux.doctor.rights import ROLES, Scope
from pollux.doctor.storage import check_storage
from pollux.doctor.versions import check_server
from pollux_agent.driver.kube.api import KubeApi, pod_path

pytestmark = [pytest.mark.needs("kube"), pytest.mark.slow, pytest.mark.timeout(900)]

__all__ = ["image"]

POLLUX = str(Path(sys.executable).with_name("pollux"))
RBAC = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture(scope="module")
def namespace(kube: TestKube) -> Iterator[str]:
    space = kube.namespace("pollux-test-doctored")
    yield space
    kube.api.delete(f"/api/v1/namespaces/{space}")


def places(namespace: str) -> Mapping[Scope, tuple[str, ...]]:
    return {"cluster": ("",), "jobs": (namespace,), "lease": (namespace,)}


def grant(api: KubeApi, finding: Finding, namespace: str, account: str, number: int) -> None:
    """Do what the finding says."""
    rules = yaml.safe_load(finding.fix.partition(":\n")[2])
    name = f"as-the-doctor-said-{number}"
    cluster = finding.fix.startswith("rules of a ClusterRole")
    kind, where = ("ClusterRole", RBAC) if cluster else ("Role", f"{RBAC}/namespaces/{namespace}")
    plural = kind.lower() + "s"
    api.create(f"{where}/{plural}", {"metadata": {"name": name}, "rules": rules})
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }
    api.create(f"{where}/{plural.removesuffix('s')}bindings", binding)


def test_the_rules_that_it_prints_are_exactly_the_ones_that_are_missing(
    kube: TestKube, namespace: str
) -> None:
    api = kube.api
    api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "scheduling"}})
    account = f"{namespace}/scheduling"
    ask = lambda: list(check_rights(api, ["scheduler", "operator"], places(namespace), account))  # noqa: E731
    missing = ask()
    assert {finding.status for finding in missing} == {"failed"}
    told = "; ".join(finding.detail for finding in missing)
    assert all(right.verb in told and right.resource in told for right in ROLES["scheduler"])
    for number, finding in enumerate(missing):
        grant(api, finding, namespace, "scheduling", number)
    try:
        assert {finding.status for finding in awaited(ask, lambda found: len(found) == 2)} == {"ok"}
    finally:
        for number in range(len(missing)):
            for kind in ("clusterroles", "clusterrolebindings"):
                api.delete(f"{RBAC}/{kind}/as-the-doctor-said-{number}")


def test_an_administrator_has_all_rights_and_the_server_is_new_enough(kube: TestKube, namespace: str) -> None:
    rights = check_rights(kube.api, list(ROLES), places(namespace), driver_account=DRIVER_ACCOUNT)
    found = [*rights, *check_server(kube.api)]
    assert {finding.status for finding in found} == {"ok"}, found


def test_two_pods_share_the_volume_or_the_finding_says_why_not(
    kube: TestKube, namespace: str, tmp_path: Path
) -> None:
    for name in ("node-0", "node-1"):
        kube.node_up(name, 4)
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    settings = kube.settings(namespace, tmp_path)
    findings = list(check_storage(kube.api, settings, namespace, host_pod()))
    assert [finding.status for finding in findings] == ["ok", "ok"], findings
    nodes = {finding.detail.split(" could ")[0].split(" on ")[1] for finding in findings}
    assert len(nodes) == 2, nodes
    assert list(tmp_path.iterdir()) == []

    of_its_own = kube.settings(namespace, tmp_path, jobs_volume={"emptyDir": {}})
    wrote, finding = check_storage(kube.api, of_its_own, namespace, host_pod())
    assert (wrote.status, finding.status) == ("ok", "failed")
    assert "could not read" in finding.detail
    assert "ReadWriteMany" in finding.fix
    left = kube.api.get(pod_path(namespace), labelSelector="pollux.dev/doctor")["items"]
    assert all(pod["metadata"].get("deletionTimestamp") for pod in left)


@pytest.mark.parametrize(
    ("group", "mode", "works"),
    [
        pytest.param(USER, 0o755, False, id="their own, but nobody else may write"),
        pytest.param(USER, 0o2775, True, id="their group's, and so is all in it"),
        pytest.param(0, 0o777, True, id="anybody's"),
    ],
)
def test_what_lets_pods_that_are_not_root_write_where_the_kubelet_makes_their_folder(
    group: int, mode: int, works: bool, kube: TestKube, namespace: str, image: str, tmp_path: Path
) -> None:
    """As the how-to says: the owner of the top folder alone is not enough, and the doctor tells."""
    (jobs := tmp_path / "jobs").mkdir()
    os.chown(jobs, USER if group else 0, group)
    jobs.chmod(mode)
    findings = list(check_storage(kube.api, kube.settings(namespace, jobs), namespace, guarded_pod()))
    if works:
        assert [finding.status for finding in findings] == ["ok", "ok"], findings
        return
    (found,) = findings
    assert (found.status, "Permission denied" in found.detail) == ("failed", True), found
    assert "chmod 2775" in found.fix
    assert list(jobs.iterdir()) == [], "what the kubelet made is gone"


class _Airflow(BaseHTTPRequestHandler):
    """As much of Airflow's REST API as the doctor asks for, for one user."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        knows = body == {"username": "pollux", "password": "in-a-secret"}
        self._answer(201 if knows else 401, {"access_token": "t"} if knows else {"detail": "Invalid"})

    def do_GET(self) -> None:
        dag = {"dag_id": "pollux_schedule", "is_paused": False, "has_import_errors": False}
        self._answer(200, {"scheduler": {"status": "healthy"}} if "health" in self.path else dag)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Not to the test's output."""


@pytest.fixture
def airflow() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Airflow)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_helm_test_runs_the_doctor_in_the_cluster_as_the_schedulers_account(
    kube: TestKube, namespace: str, airflow: str, tmp_path: Path
) -> None:
    """With all that the how-to names; the second namespace of jobs is looked at as well."""
    kube.node_up("node-0", 4)
    other = kube.bare_namespace("pollux-test-doctored-too")
    login = base64.b64encode(json.dumps({"pollux": "in-a-secret"}).encode()).decode()
    secret = {"metadata": {"name": "airflow.log-in"}, "data": {"login.json": login}}
    kube.api.create(f"/api/v1/namespaces/{namespace}/secrets", secret)
    server = urlparse(kube.api.client.configuration.host)
    pod = host_pod()["spec"]
    with mlflow_server(tmp_path) as url:
        values: dict[str, Any] = {
            "mlflow": {"trackingUri": url},
            "leaseNamespace": namespace,
            "namespaces": [namespace, other],
            "airflow": {"url": airflow, "loginSecret": "airflow.log-in"},
            "test": {
                "image": "localhost/host:1",
                "command": [POLLUX, "doctor", "--cluster", "kubernetes"],
                "hostNetwork": True,
                "resources": {"requests": {"cpu": "1"}},
                "securityContext": {
                    "runAsNonRoot": os.getuid() != 0,
                    "runAsUser": os.getuid(),
                    "runAsGroup": os.getgid(),
                },
                "volumes": pod["volumes"],
                "volumeMounts": pod["containers"][0]["volumeMounts"],
                "env": [
                    {"name": "KUBERNETES_SERVICE_HOST", "value": str(server.hostname)},
                    {"name": "KUBERNETES_SERVICE_PORT", "value": str(server.port)},
                ],
            },
        }
        where = ("--namespace", namespace)
        run_tool(
            "helm", "install", "checked", str(CHART), *where, "--values", "-",
            kubeconfig=kube.kubeconfig, stdin=json.dumps(values),
        )  # fmt: skip
        try:
            arguments = ("test", "checked", *where, "--logs", "--timeout", "400s")
            found = run_tool("helm", *arguments, kubeconfig=kube.kubeconfig, check=False)
            assert found.returncode == 0, found.stdout + found.stderr
            assert f"rights: scheduler: there are all {len(ROLES['scheduler'])} in" in found.stdout
            assert f"Airflow: {airflow} is healthy and knows our log-in" in found.stdout
            assert f"quota: {namespace}:" in found.stdout
            assert f"quota: {other}:" in found.stdout
            assert "of nvidia.com/gpu on" in found.stdout
            assert "0 failed" in found.stdout
        finally:
            run_tool("helm", "uninstall", "checked", *where, kubeconfig=kube.kubeconfig, check=False)
            kube.api.delete(f"/api/v1/namespaces/{other}")


def test_the_command_ends_with_1_on_a_quota_of_nothing(
    kube: TestKube, namespace: str, tmp_path: Path
) -> None:
    kube.node_up("node-0", 4)
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    kube.api.create(
        quotas, {"metadata": {"name": "none"}, "spec": {"hard": {"requests.nvidia.com/gpu": "0"}}}
    )
    awaited(lambda: kube.api.get(f"{quotas}/none").get("status", {}).get("hard"))
    command = [POLLUX, "doctor", "--json", "--cluster", "kubernetes"]
    environ = {
        "PATH": os.defpath,
        "HOME": str(tmp_path),
        "POLLUX_STATE": str(tmp_path),
        "POLLUX_KUBE_CONFIG": str(kube.kubeconfig),
        "POLLUX_KUBE_NAMESPACE": namespace,
    }
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    finally:
        kube.api.delete(f"{quotas}/none")
    assert done.returncode == 1, done.stderr
    failed = {f["check"]: f for f in json.loads(done.stdout)["findings"] if f["status"] == "failed"}
    assert set(failed) == {"quota", "MLflow", "shared storage"}
    assert failed["quota"]["fix"] == f"raise requests.nvidia.com/gpu of ResourceQuota none in {namespace}"
