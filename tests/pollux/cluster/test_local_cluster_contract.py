"""The local cluster keeps the contract: a real service, with real processes as workers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from cluster_contract import NODES, ClusterContract, awaited

from pollux.cluster.local import LocalCluster
from pollux.errors import ClusterUnavailable
from pollux_agent.protocol import JobSpec


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    state = tmp_path_factory.mktemp("state")
    nodes = [{"name": name, "slots": slots} for name, slots in NODES.items()]
    (state / "cluster.json").write_text(json.dumps({"nodes": nodes}))
    (state / "sleep.py").write_text("import time\n\ntime.sleep(600)\n")
    command = [str(Path(sys.executable).with_name("pollux")), "local", "serve", "--state", str(state)]
    with (state / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--scripts", str(state), "--grace", "2"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    cluster = LocalCluster(state / "local.sock", timeout=timedelta(seconds=30))

    def answers() -> bool:
        assert process.poll() is None, (state / "serve.log").read_text()
        try:
            return bool(cluster.health())
        except ClusterUnavailable:
            return False

    try:
        awaited(answers, bool)
        yield cluster
    finally:
        process.terminate()
        process.wait(60)


class TestLocalCluster(ClusterContract):
    @pytest.fixture
    def cluster(self, service: LocalCluster) -> LocalCluster:
        return service

    @pytest.fixture
    def spec(self) -> JobSpec:
        return JobSpec(
            name="sleeper", script="sleep.py", initial_batch_size=1, max_local_batch_size=1, max_gpus=4
        )
