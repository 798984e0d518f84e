"""From chosen configurations to GPUs on nodes, with as few moves as can be; Sia section 3.1.

The three rules: part of a node is never split over two nodes, whole nodes are taken whole, and where the free
GPUs are too scattered for that, jobs that were to stay are evicted and placed again.
"""

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from pollux.policy.options import Options
from pollux.policy.tables import Ints
from pollux.snapshot import DEFAULT_RESTART_S, Snapshot


def place(snapshot: Snapshot, options: Options, option: Ints) -> list[Mapping[str, int]]:
    """A placement for each job of the snapshot; ``option[j]`` is the option chosen for job j, -1 for none.

    Pinned jobs keep theirs. A job whose count is no power of two may find no place; then it gets nothing.
    """
    board = _Board(snapshot, options)
    placements: list[Mapping[str, int]] = [{} for _ in snapshot.jobs]
    waiting = []
    for row, job in enumerate(snapshot.jobs):
        chosen = int(option[row])
        if options.present.pinned[row]:
            placements[row] = job.placement
        elif chosen >= 0 and not (options.keeps[chosen] and board.keep(row, job.placement)):
            waiting.append(row)
    # whole nodes first, then from large to small: nothing placed later can push out what was placed before
    key = {row: (options.width[option[row]] == 0, -options.gpus[option[row]], row) for row in waiting}
    queue = sorted(waiting, key=key.__getitem__)
    while queue:
        row = queue.pop(0)
        chosen = int(option[row])
        for evicted in board.give(row, chosen):
            key[evicted] = (options.width[option[evicted]] == 0, -options.gpus[option[evicted]], evicted)
            insort(queue, evicted, key=key.__getitem__)
    for row, where in board.held.items():
        placements[row] = {snapshot.nodes[node].name: gpus for node, gpus in sorted(where.items())}
    return placements


_Clearing = tuple[float, int, int, int, list[int]]
"""What it takes to free GPUs on a node: price, GPUs then free, the node, its version, and who goes."""


@dataclass(slots=True)
class _Clearings:
    """What freeing so many GPUs takes on each node of a type: a heap, the nodes that changed since apart.

    An entry whose version is not that of its node any more is passed over.
    """

    heap: list[_Clearing]
    changed: set[int] = field(default_factory=set)


class _Board:
    """Who holds what on which node while jobs are placed.

    Nodes with so many free GPUs are kept in heaps, which may name a node that has another number by now.
    """

    def __init__(self, snapshot: Snapshot, options: Options) -> None:
        hardware = options.hardware
        self._options = options
        self._index = {node.name: index for index, node in enumerate(snapshot.nodes)}
        self._free = hardware.free.tolist()
        self._width = hardware.width.tolist()
        self._whole = hardware.whole.tolist()
        self._tenants: list[set[int]] = [set() for _ in self._free]
        self._by_free: dict[int, dict[int, list[int]]] = {}
        self._clearings: dict[tuple[int, int], _Clearings] = {}
        self._version = [0] * len(self._free)
        self._kind = hardware.kind.tolist()
        self._price = [DEFAULT_RESTART_S if job.restart_s is None else job.restart_s for job in snapshot.jobs]
        for node, gpus in enumerate(self._free):
            self._by_free.setdefault(self._kind[node], {}).setdefault(gpus, []).append(node)
        self.held: dict[int, dict[int, int]] = {}

    def keep(self, row: int, placement: Mapping[str, int]) -> bool:
        """Leave a job where it is; False where a node is not free for it."""
        where = {self._index[name]: gpus for name, gpus in placement.items()}
        if any(self._free[node] < gpus for node, gpus in where.items()):
            return False
        if len(where) > 1 and not all(self._whole[node] for node in where):
            return False
        self._take(row, where)
        return True

    def give(self, row: int, option: int) -> list[int]:
        """Place a job, and say which jobs had to be evicted for it."""
        kind, gpus = int(self._options.kind[option]), int(self._options.gpus[option])
        width, nodes = int(self._options.width[option]), int(self._options.nodes[option])
        if width:
            return self._give_nodes(row, kind, width, nodes, gpus)
        evicted: list[int] = []
        node = self._snuggest(kind, gpus)
        if node is None:
            node, evicted = self._clear(kind, gpus)
            if node is None:
                return []
            for tenant in evicted:
                self._release(tenant)
        self._take(row, {node: gpus})
        return evicted

    def _give_nodes(self, row: int, kind: int, width: int, nodes: int, gpus: int) -> list[int]:
        """Whole nodes, those that cost least restarting first; the last one only as far as the count goes."""
        candidates = [
            node
            for node in range(len(self._free))
            if self._kind[node] == kind
            and self._whole[node]
            and self._width[node] == width
            and all(len(self.held[tenant]) == 1 for tenant in self._tenants[node])
        ]
        if len(candidates) < nodes:
            return []
        candidates.sort(key=lambda node: (self._prices(self._tenants[node]), -self._free[node], node))
        chosen = candidates[:nodes]
        evicted = sorted(tenant for node in chosen for tenant in self._tenants[node])
        for tenant in evicted:
            self._release(tenant)
        last = gpus - width * (nodes - 1)
        self._take(row, dict.fromkeys(chosen[:-1], width) | {chosen[-1]: last})
        return evicted

    def _snuggest(self, kind: int, gpus: int) -> int | None:
        """The node with the fewest free GPUs that are enough; the first of several."""
        levels = self._by_free.get(kind, {})
        for level in sorted(level for level in levels if level >= gpus):
            nodes = levels[level]
            while nodes and self._free[nodes[0]] != level:
                heappop(nodes)
            if nodes:
                return nodes[0]
        return None

    def _clear(self, kind: int, gpus: int) -> tuple[int | None, list[int]]:
        """The node where smaller jobs that have to go restart for the least time, and those jobs."""
        known = self._clearings.get((kind, gpus))
        if known is None:
            mine = [node for node, each in enumerate(self._kind) if each == kind]
            known = _Clearings([each for node in mine if (each := self._clearing(node, gpus))])
            heapify(known.heap)
            self._clearings[kind, gpus] = known
        for node in sorted(known.changed):
            if again := self._clearing(node, gpus):
                heappush(known.heap, again)
        known.changed.clear()
        while known.heap and known.heap[0][3] != self._version[known.heap[0][2]]:
            heappop(known.heap)
        return (known.heap[0][2], known.heap[0][4]) if known.heap else (None, [])

    def _clearing(self, node: int, gpus: int) -> _Clearing | None:
        """What it takes to free so many GPUs on a node; None where that cannot be."""
        if self._width[node] < gpus:
            return None
        smaller = sorted(
            (tenant for tenant in self._tenants[node] if self._smaller(tenant, gpus)),
            key=lambda tenant: (-sum(self.held[tenant].values()), tenant),
        )
        goes, gained = [], self._free[node]
        for tenant in smaller:
            if gained >= gpus:
                break
            goes.append(tenant)
            gained += sum(self.held[tenant].values())
        return (self._prices(goes), gained, node, self._version[node], goes) if gained >= gpus else None

    def _prices(self, rows: Iterable[int]) -> float:
        """Seconds that these jobs restart for, and a little for each of them."""
        return sum(self._price[row] + 1.0 for row in rows)

    def _smaller(self, tenant: int, gpus: int) -> bool:
        return len(self.held[tenant]) == 1 and sum(self.held[tenant].values()) < gpus

    def _take(self, row: int, where: dict[int, int]) -> None:
        self.held[row] = where
        for node, gpus in where.items():
            self._move(node, -gpus)
            self._tenants[node].add(row)
            if len(where) > 1:
                self._whole[node] = False

    def _release(self, row: int) -> None:
        for node, gpus in self.held.pop(row).items():
            self._move(node, gpus)
            self._tenants[node].discard(row)

    def _move(self, node: int, gpus: int) -> None:
        kind = self._kind[node]
        self._free[node] += gpus
        heappush(self._by_free[kind].setdefault(self._free[node], []), node)
        self._version[node] += 1
        for (of_kind, _), known in self._clearings.items():
            if of_kind == kind:
                known.changed.add(node)
