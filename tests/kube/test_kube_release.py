"""The doctor outside of the cluster takes the settings of the release that is installed there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helm_runs import CHART, run_tool
from kube_nodes import TestKube

from pollux.cluster.k8s import kube_settings
from pollux.doctor.release import read_release
from pollux.errors import ConfigError

pytestmark = [pytest.mark.needs("kube"), pytest.mark.slow]

SPACE = "pollux-test-released"
URI = "http://mlflow.ml:5000"


@pytest.fixture(scope="module")
def release(kube: TestKube) -> Iterator[str]:
    kube.bare_namespace(SPACE)
    values = {
        "mlflow": {"trackingUri": URI},
        "namespaces": [SPACE],
        "checkpoints": {"volume": {"hostPath": {"path": "/jobs"}}},
        "metrics": {"existingSecret": "token"},
    }
    where = ("--namespace", SPACE)
    run_tool(
        "helm", "install", "ours", str(CHART), *where, "--values", "-",
        kubeconfig=kube.kubeconfig, stdin=json.dumps(values),
    )  # fmt: skip
    yield f"{SPACE}/ours"
    run_tool("helm", "uninstall", "ours", *where, kubeconfig=kube.kubeconfig, check=False)
    kube.api.delete(f"/api/v1/namespaces/{SPACE}")


def test_the_settings_are_those_of_airflows_pods_but_for_paths_in_them(kube: TestKube, release: str) -> None:
    told = read_release(kube.api, release)
    found = told.settings
    assert found["MLFLOW_TRACKING_URI"] == found["POLLUX_KUBE_MLFLOW_TRACKING_URI"] == URI
    assert told.inside == {"POLLUX_STATE", "POLLUX_METRICS_TOKEN"}
    assert not told.inside & found.keys()
    assert told.training_pod is None
    settings = kube_settings(found)
    assert settings.namespace == SPACE
    assert settings.jobs_volume == {"hostPath": {"path": "/jobs"}}
    assert settings.driver_service_account == "ours-pollux-driver"


@pytest.mark.parametrize("name", ["ours", f"{SPACE}/", f"{SPACE}/another"])
def test_a_release_that_is_not_there_is_named(kube: TestKube, release: str, name: str) -> None:
    with pytest.raises(ConfigError, match="--release"):
        read_release(kube.api, name)


def test_the_command_goes_by_them(kube: TestKube, release: str, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("pollux")), "doctor", "--json", "--release", release]
    environ = {
        "PATH": os.defpath,
        "HOME": str(tmp_path),
        "POLLUX_STATE": str(tmp_path),
        "KUBECONFIG": str(kube.kubeconfig),
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
    }
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["shared storage"]["detail"] == "not tried", "the release has a volume"
    assert "127.0.0.1:9 does not answer" in findings["MLflow"]["detail"], "our own way to it wins"
    assert findings["quota"]["detail"].startswith(f"{SPACE}: ")
