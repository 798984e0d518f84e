"""The cluster file: which nodes the local cluster has, and how many slots each."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.errors import ConfigError
from pollux.snapshot import Node
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, decode, encode
from pollux_agent.records import write_atomic

NodeName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Device = Annotated[int, Field(ge=0, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class LocalNode:
    """A part of this machine that counts as one node.

    Without ``devices`` a slot is a share of the CPU; with them, slot i is the CUDA device ``devices[i]``.
    """

    name: NodeName
    slots: Annotated[int, Field(ge=1, le=1024, strict=True)]
    gpu_type: Annotated[str, Field(min_length=1)] = "gpu"
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class LocalNodes:
    """The content of ``cluster.json``."""

    nodes: Annotated[tuple[LocalNode, ...], Field(min_length=1)]

    @property
    def num_slots(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def num_cpu_slots(self) -> int:
        """Slots that share the CPU."""
        return sum(node.slots for node in self.nodes if not node.devices)

    def node(self, name: str) -> LocalNode | None:
        return next((node for node in self.nodes if node.name == name), None)

    def view(self) -> tuple[Node, ...]:
        """The nodes as a policy sees them."""
        return tuple(Node(name=node.name, gpus=node.slots, gpu_type=node.gpu_type) for node in self.nodes)


DEFAULT_NODES = LocalNodes(nodes=(LocalNode(name="node-0", slots=2), LocalNode(name="node-1", slots=2)))


def read_nodes(path: Path) -> LocalNodes:
    """Read the cluster file; where there is none, write the default one of 2 nodes with 2 slots.

    Raises ConfigError naming file, field, value and fix.
    """
    if not path.exists():
        write_atomic(path, encode(DEFAULT_NODES).encode() + b"\n")
        return DEFAULT_NODES
    try:
        nodes = decode(LocalNodes, path.read_bytes())
    except (DocumentError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None
    names = [node.name for node in nodes.nodes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{path}: nodes: the name {twice[0]!r} is there twice; give each node its own")
    for node in nodes.nodes:
        if node.devices and len(node.devices) != node.slots:
            raise ConfigError(
                f"{path}: nodes: {node.name!r} has {node.slots} slots but devices {list(node.devices)}; "
                "name one device a slot, or none"
            )
    devices = [device for node in nodes.nodes for device in node.devices]
    if len(set(devices)) < len(devices):
        raise ConfigError(f"{path}: devices: one is named twice in {devices}; a device can be one slot only")
    return nodes
