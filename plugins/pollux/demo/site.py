"""Where the demo's jobs run: on the stack's own local cluster, or on Kubernetes (``pollux.demo.kube``)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pollux.cluster.base import ClusterJob
from pollux.cluster.local import LocalCluster
from pollux.local.nodes import LocalNodes
from pollux_agent.protocol import encode
from pollux_agent.records import write_atomic


class JobLook(Protocol):
    """What the demo asks a cluster."""

    def job(self, job_id: str) -> ClusterJob:
        """The job as it is now, final or not; raises UnknownJob, ClusterUnavailable."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A cluster for one demo. ``settings`` are what the stack's services need to know of it, and ``look``
    gives the way to its jobs, once the stack in that state folder runs."""

    kind: Literal["local", "kubernetes"]
    nodes: LocalNodes
    settings: Mapping[str, str] = field(default_factory=dict)
    look: Callable[[Path], JobLook]


def local_site(nodes: LocalNodes, state: Path) -> Site:
    """The stack's own cluster, with these nodes."""
    write_atomic(state / "cluster.json", encode(nodes).encode())
    return Site(kind="local", nodes=nodes, look=lambda folder: LocalCluster(folder / "local.sock"))
