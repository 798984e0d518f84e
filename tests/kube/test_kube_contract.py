"""Kubernetes keeps the cluster's contract: real API server and nodes, drivers and workers as real pods."""

from pathlib import Path

import pytest
from cluster_contract import NODES, ClusterContract
from kube_nodes import TestKube

from pollux.cluster.k8s import KubeCluster
from pollux_agent.protocol import JobSpec

pytestmark = [pytest.mark.needs("kube"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def space(kube: TestKube) -> str:
    for name, gpus in NODES.items():
        kube.node_up(name, gpus)
    return kube.namespace("pollux-test-contract")


class TestKubeCluster(ClusterContract):
    @pytest.fixture
    def cluster(self, kube: TestKube, space: str, tmp_path: Path) -> KubeCluster:
        (kube.folder / "sleep.py").write_text("import time\n\ntime.sleep(600)\n")
        return kube.cluster(kube.settings(space, tmp_path / "jobs", grace_s=2.0, place_wait_s=45.0))

    @pytest.fixture
    def spec(self, kube: TestKube) -> JobSpec:
        return JobSpec(
            name="sleeper",
            script=str(kube.folder / "sleep.py"),
            initial_batch_size=1,
            max_local_batch_size=1,
            max_gpus=4,
        )
