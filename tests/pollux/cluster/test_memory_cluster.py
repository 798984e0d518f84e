"""The cluster in memory keeps the contract, whether its workers follow at once or late."""

import pytest
from cluster_contract import NODES, ClusterContract

from pollux.cluster.memory import MemoryCluster
from pollux.snapshot import Node
from pollux_agent.protocol import JobSpec


@pytest.mark.parametrize("lag", [0, 3], ids=["at once", "three calls late"])
class TestMemoryCluster(ClusterContract):
    @pytest.fixture
    def cluster(self, lag: int) -> MemoryCluster:
        return MemoryCluster(tuple(Node(name=name, gpus=gpus) for name, gpus in NODES.items()), lag=lag)

    @pytest.fixture
    def spec(self) -> JobSpec:
        return JobSpec(
            name="sleeper", script="sleep.py", initial_batch_size=1, max_local_batch_size=1, max_gpus=4
        )


def test_a_call_that_dies_before_or_after_its_effect_can_be_simulated() -> None:
    cluster = MemoryCluster((Node(name="node-0", gpus=1),))

    def die(method: str) -> None:
        if method == "next_decision":
            raise KeyboardInterrupt

    cluster.before = die
    with pytest.raises(KeyboardInterrupt):
        cluster.next_decision()
    cluster.before, cluster.after = (lambda method: None), die
    with pytest.raises(KeyboardInterrupt):
        cluster.next_decision()
    cluster.after = lambda method: None
    assert cluster.next_decision() == 2
