"""Installs the project's chart for the demo, and gives Airflow the rights that the chart grants it."""

import base64
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pollux
from pollux.errors import ConfigError, DemoError
from pollux_agent.driver.kube.api import KubeApi, KubeError
from pollux_agent.records import write_atomic

NAMESPACE = RELEASE = "pollux-demo"
ACCOUNT = "airflow"
"""Of the Airflow on this machine; the chart gives it what the scheduling task and the operator need."""

_HELM_S = 120
_GONE_S = 120.0
_TOKEN_S = 4 * 3600
_KEPT = ("POLLUX_CLUSTER", "POLLUX_DEPLOYMENT", "POLLUX_KUBE_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The release ``pollux-demo`` in a namespace of that name, by the rights of ``kubeconfig``."""

    api: KubeApi
    kubeconfig: Path
    home: Path

    @contextmanager
    def installed(self, *, jobs: Path) -> Iterator[dict[str, str]]:
        """The settings that the chart has for Airflow. ``jobs`` is the folder behind the checkpoints' volume,
        at the same place on every node.

        Raises DemoError where the namespace is in use or helm fails, ConfigError where there is no helm.
        """
        self._make_namespace()
        try:
            self._helm("install", RELEASE, str(_chart()), "--values", "-", stdin=json.dumps(_values(jobs)))
            yield self._settings()
        finally:
            with contextlib.suppress(DemoError):
                self._helm("uninstall", RELEASE)
            self._remove_namespace()

    def airflow_kubeconfig(self, path: Path) -> Path:
        """Write the kubeconfig of Airflow's account, with a token that lasts some hours."""
        where = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": _TOKEN_S},
        }
        token = self.api.create(where, request)["status"]["token"]
        write_atomic(path, json.dumps(_kubeconfig(self.api, token)).encode())
        path.chmod(0o600)
        return path

    def _make_namespace(self) -> None:
        try:
            self.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        except KubeError as error:
            if error.status == 409:
                raise DemoError(
                    f"the cluster has a namespace {NAMESPACE}, which an earlier demo left or another uses; "
                    f"to remove it: kubectl delete namespace {NAMESPACE}"
                ) from None
            raise DemoError(f"the demo's namespace cannot be made: {error}") from None
        self.api.create(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": ACCOUNT}})

    def _remove_namespace(self) -> None:
        """Delete it, and wait for some time until it is gone with all that is in it."""
        path = f"/api/v1/namespaces/{NAMESPACE}"
        until_s = time.monotonic() + _GONE_S
        with contextlib.suppress(KubeError):
            self.api.delete(path)
            while time.monotonic() < until_s:
                self.api.get(path)
                time.sleep(1.0)

    def _settings(self) -> dict[str, str]:
        found = self.api.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{RELEASE}-settings")
        return {name: str(text) for name, text in found["data"].items() if name.startswith(_KEPT)}

    def _helm(self, *arguments: str, stdin: str = "") -> None:
        """Run the helm that ``make setup`` puts beside the interpreter, with a home of its own."""
        program = Path(sys.executable).with_name("helm")
        if not program.is_file():
            raise ConfigError(f"helm: not at {program}; run make setup")
        self.home.mkdir(exist_ok=True)
        environ = {"PATH": os.defpath, "HOME": str(self.home), "KUBECONFIG": str(self.kubeconfig)}
        try:
            done = subprocess.run(
                [str(program), *arguments, "--namespace", NAMESPACE],
                input=stdin,
                env=environ,
                capture_output=True,
                text=True,
                check=False,
                timeout=_HELM_S,
            )
        except subprocess.TimeoutExpired:
            raise DemoError(f"helm {arguments[0]} did not end within {_HELM_S} s") from None
        if done.returncode != 0:
            raise DemoError(f"helm {arguments[0]} failed:\n{done.stderr[-2000:]}")


def _chart() -> Path:
    """The chart in the project's checkout."""
    return Path(pollux.__file__).resolve().parents[2] / "charts" / "pollux"


def _values(jobs: Path) -> dict[str, Any]:
    return {
        "airflow": {"serviceAccounts": [{"name": ACCOUNT, "namespace": NAMESPACE}]},
        "checkpoints": {"volume": {"hostPath": {"path": str(jobs), "type": "DirectoryOrCreate"}}},
        "dags": {"create": False},
        "metrics": {"dashboard": {"enabled": False}},
        "test": {"enabled": False},
    }


def _kubeconfig(api: KubeApi, token: str) -> dict[str, Any]:
    """As JSON, which is YAML too."""
    configuration = api.client.configuration
    cluster: dict[str, Any] = {"server": configuration.host}
    if configuration.ssl_ca_cert:
        authority = Path(configuration.ssl_ca_cert).read_bytes()
        cluster["certificate-authority-data"] = base64.b64encode(authority).decode()
    if not configuration.verify_ssl:
        cluster["insecure-skip-tls-verify"] = True
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "demo", "cluster": cluster}],
        "users": [{"name": ACCOUNT, "user": {"token": token}}],
        "contexts": [{"name": "demo", "context": {"cluster": "demo", "user": ACCOUNT}}],
        "current-context": "demo",
    }
