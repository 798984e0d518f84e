"""Placing a given number of GPUs, the node with most free GPUs first; what the baselines share."""

from collections.abc import Mapping, MutableMapping

from pollux.policy.models import accepts, standing_jobs
from pollux.snapshot import Job, Node, Snapshot


class Room:
    """The cluster's free GPUs while a decision gives them out.

    A placement lies within one type of GPU. Where the snapshot asks to avoid interference, no node gets a
    second job that spans nodes.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._nodes = snapshot.nodes
        self._free: MutableMapping[str, int] = {node.name: node.gpus for node in snapshot.nodes}
        self._spanned: set[str] = set()
        self._avoid = snapshot.policy.avoid_interference

    def take(self, placement: Mapping[str, int]) -> None:
        """Give out what a job keeps."""
        for name, gpus in placement.items():
            self._free[name] -= gpus
        if len(placement) > 1 and self._avoid:
            self._spanned.update(placement)

    def place(self, job: Job, gpus: int, gpu_type: str | None = None) -> dict[str, int]:
        """Take ``gpus`` for the job, in the order in which nodes are picked; {} where they do not fit."""
        for kind in dict.fromkeys(node.gpu_type for node in self._nodes):
            if gpu_type not in (None, kind):
                continue
            nodes = [node for node in self._nodes if node.gpu_type == kind and accepts(job, node)]
            placement = self._on(nodes, gpus)
            if placement:
                self.take(placement)
                return placement
        return {}

    def _on(self, nodes: list[Node], gpus: int) -> dict[str, int]:
        by_free = sorted(nodes, key=lambda node: -self._free[node.name])
        if by_free and self._free[by_free[0].name] < gpus:
            by_free = [node for node in by_free if node.name not in self._spanned]
        placement: dict[str, int] = {}
        for node in by_free:
            share = min(self._free[node.name], gpus - sum(placement.values()))
            if share > 0:
                placement[node.name] = share
        return placement if gpus > 0 and sum(placement.values()) == gpus else {}


def keeps(snapshot: Snapshot) -> frozenset[str]:
    """Jobs that may not be preempted and hold GPUs that are still there."""
    standing = standing_jobs(snapshot)
    return frozenset(job.job_id for job in snapshot.jobs if job.job_id in standing and not job.preemptible)
