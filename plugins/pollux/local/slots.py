"""Who holds which slot. A slot is free only when nothing of its last holder is left."""

from collections.abc import Mapping

from pollux.local.nodes import LocalNodes
from pollux_agent.protocol import Placement


class Slots:
    """The book of slots; every slot has one holder at most."""

    def __init__(self, nodes: LocalNodes) -> None:
        self._holders: dict[str, list[str | None]] = {node.name: [None] * node.slots for node in nodes.nodes}

    def blocked(self, placement: Placement) -> str:
        """Why ``placement`` cannot be taken now, naming who holds what it needs; empty if it can."""
        for node, wanted in placement.items():
            holders = self._holders.get(node)
            if holders is None:
                return f"there is no node {node}"
            if wanted > holders.count(None):
                others = ", ".join(sorted({holder for holder in holders if holder is not None}))
                return f"{node} has {holders.count(None)} of {wanted} slots free, {others} holds the others"
        return ""

    def take(self, holder: str, placement: Placement) -> Mapping[str, tuple[int, ...]]:
        """Take free slots, the lowest first; slot numbers per node. Ask :meth:`blocked` first."""
        taken: dict[str, tuple[int, ...]] = {}
        for node, wanted in placement.items():
            free = [slot for slot, owner in enumerate(self._holders[node]) if owner is None][:wanted]
            if len(free) < wanted:
                raise ValueError(f"{holder}: {node} has only {len(free)} of {wanted} slots free")
            taken[node] = tuple(free)
        for node, slots in taken.items():
            for slot in slots:
                self._holders[node][slot] = holder
        return taken

    def release(self, holder: str) -> None:
        """Give back all that ``holder`` has."""
        for holders in self._holders.values():
            for slot, owner in enumerate(holders):
                if owner == holder:
                    holders[slot] = None

    def held(self) -> dict[str, dict[str, int]]:
        """Slots per node of each holder."""
        book: dict[str, dict[str, int]] = {}
        for node, holders in self._holders.items():
            for holder in holders:
                if holder is not None:
                    book.setdefault(holder, {}).setdefault(node, 0)
                    book[holder][node] += 1
        return book
