"""A real Kubernetes API server for the chart, and kubeconfigs of the accounts that it makes."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from helm_runs import run_tool


@pytest.fixture(scope="session")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The kubeconfig of an administrator: KUBECONFIG's if that is set, else of a cluster of our own."""
    if os.environ.get("KUBECONFIG"):
        yield Path(os.environ["KUBECONFIG"])
        return
    scripts = Path(os.environ["POLLUX_KUBE"])
    state = tmp_path_factory.mktemp("kube")
    subprocess.run([str(scripts / "up.sh"), str(state)], check=True, capture_output=True, timeout=180)
    try:
        yield state / "kubeconfig"
    finally:
        subprocess.run([str(scripts / "down.sh"), str(state), "--purge"], check=True, capture_output=True)


@pytest.fixture(scope="session")
def kubeconfig_of(admin: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Make the kubeconfig of a ServiceAccount, with a token that the API server issued."""
    folder = tmp_path_factory.mktemp("accounts")

    def make(namespace: str, account: str) -> Path:
        token = run_tool(
            "kubectl", "create", "token", account, "-n", namespace, kubeconfig=admin
        ).stdout.strip()
        config = yaml.safe_load(admin.read_text())
        (context,) = (c for c in config["contexts"] if c["name"] == config["current-context"])
        config["users"] = [{"name": "account", "user": {"token": token}}]
        context["context"]["user"] = "account"
        path = folder / f"{namespace}-{account}"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    return make
