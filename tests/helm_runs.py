"""Real helm on the real chart."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

TOP = Path(__file__).resolve().parents[1]
CHART = TOP / "charts" / "pollux"
TOOLS = Path(sys.executable).parent
NAMESPACE = "pollux-test-system"

Manifest = Mapping[str, Any]


def run_tool(
    tool: str, *arguments: str, kubeconfig: Path | None = None, stdin: str | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """helm or kubectl, as ``make setup`` puts them beside the interpreter, with a home of its own.

    Skips the test where ``make setup`` could not have them, which does not pass for a complete session.
    """
    if not (TOOLS / tool).exists():
        pytest.skip(f"{TOOLS / tool} is not there; run {sys.executable} .ci/helm.py {TOOLS}")
    home = os.environ["AIRFLOW_HOME"]
    environ = {"PATH": os.defpath, "HOME": home, "KUBECONFIG": str(kubeconfig or Path(home) / "none")}
    found = subprocess.run(
        [str(TOOLS / tool), *arguments], env=environ, input=stdin, capture_output=True, text=True, timeout=420
    )
    if check:
        assert found.returncode == 0, f"{tool} {arguments}: {found.stdout}\n{found.stderr}"
    return found


def account_kubeconfig(admin: Path, namespace: str, account: str, path: Path) -> Path:
    """Write to ``path`` the kubeconfig of a ServiceAccount, with a token that the API server issued."""
    made = run_tool("kubectl", "create", "token", account, "-n", namespace, kubeconfig=admin)
    config = yaml.safe_load(admin.read_text())
    (context,) = (c for c in config["contexts"] if c["name"] == config["current-context"])
    config["users"] = [{"name": "account", "user": {"token": made.stdout.strip()}}]
    context["context"]["user"] = "account"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


def render(values: Mapping[str, Any] | None = None, *, release: str = "pollux") -> list[Manifest]:
    """All objects of the chart, the test's pod included."""
    found = run_tool(
        "helm", "template", release, str(CHART), "--namespace", NAMESPACE, "--values", "-",
        stdin=json.dumps(values or {}),
    )  # fmt: skip
    return [manifest for manifest in yaml.safe_load_all(found.stdout) if manifest]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (m for m in of_kind(manifests, kind) if m["metadata"]["name"] == name)
    return found


VALUE_SETS: Mapping[str, Mapping[str, Any]] = {
    "nothing set": {},
    "a whole installation": {
        "deployment": "research",
        "namespaces": ["pollux-test-a", "pollux-test-b"],
        "airflow": {
            "serviceAccounts": [
                {"name": "airflow-worker", "namespace": "airflow"},
                {"name": "airflow-triggerer"},
            ],
            "readers": [{"name": "airflow-api-server", "namespace": "airflow"}],
            "url": "http://airflow-api-server.airflow:8080",
            "loginSecret": "airflow-login",
        },
        "mlflow": {"trackingUri": "http://mlflow.ml:5000", "externalUrl": "https://mlflow.example.org"},
        "gpus": {"resources": ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"], "typeLabel": "gpu/type"},
        "leaseNamespace": "pollux-test-lease",
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "settings": {"POLLUX_SEED": 3},
        "checkpoints": {"pvc": {"storageClassName": "fast", "size": "1Ti"}},
        "state": {"pvc": {"create": True}},
        "networkPolicy": {
            "restrictEgress": True,
            "egress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 443}]}],
        },
        "metrics": {"existingSecret": "metrics-token"},
    },
    "shadow": {"scheduler": {"shadow": True}, "airflow": {"serviceAccounts": [{"name": "airflow"}]}},
    "as little as possible": {
        "rbac": {"create": False},
        "dags": {"create": False},
        "scheduler": {"serviceAccount": {"create": False}},
        "driver": {"serviceAccount": {"create": False, "name": "there-already"}},
        "worker": {"serviceAccount": {"create": False}},
        "networkPolicy": {"enabled": False},
        "checkpoints": {"volume": {"nfs": {"server": "nas", "path": "/jobs"}}},
        "metrics": {"dashboard": {"enabled": False}},
        "test": {"enabled": False},
    },
}
