"""Configurations (n nodes, r GPUs, type t) that each job may be given; Sia sections 3.3 and 3.4.

Within a node a job gets a power of two GPUs, beyond it whole nodes. A node whose GPUs are no power of two
counts as several virtual nodes, one for each power of two in the sum, and may also be taken whole. So every
choice that respects the capacities can be placed with no node serving two jobs that span nodes.

Where this leaves nothing for a job (its least and its limit enclose no such count, as for a rigid job of
three GPUs), its least count is offered; and so is what it holds today on one node.
"""

from dataclasses import dataclass, replace

import numpy as np

from pollux.policy.models import job_limit, standing_jobs
from pollux.policy.tables import Bools, Floats, Ints, goodputs, models_of
from pollux.snapshot import Job, Snapshot

_DENSE_NODES = 16
"""Up to here every number of whole nodes is offered, beyond it each is about an eighth more than the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The nodes of a snapshot as arrays (N), less what pinned jobs hold.

    ``kind`` is the index in ``types``; ``free`` GPUs can be given; ``whole`` nodes are free for a job that
    spans nodes; ``width`` is the node's size.
    """

    types: tuple[str, ...]
    kind: Ints
    width: Ints
    free: Ints
    whole: Bools

    @property
    def total(self) -> int:
        """All GPUs, those of pinned jobs too."""
        return int(self.width.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """What each job holds that is still there; arrays (J): type, nodes and GPUs, all 0 where nothing.

    ``pinned`` jobs keep it: those that may not be preempted, reserved ones, and those that are restarting.
    ``regular`` ones hold a configuration that can be kept.
    """

    kind: Ints
    nodes: Ints
    gpus: Ints
    pinned: Bools
    regular: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every pair of a movable job and a configuration that it may have; arrays (O), sorted by job.

    ``width`` is 0 within a node, else the size of the nodes that are taken whole. ``keeps`` marks what the
    job holds now. Rows bound what options take together: option ``entry_option[i]`` takes ``entry_amount[i]``
    of ``limit[entry_row[i]]``. ``fair`` and ``now`` (J) are a job's goodput on its fair share and today,
    ``fitted`` (J) says whether they are in samples per second, and ``at_m0`` (J) whether they are, but of a
    training at M0, as nothing is known of the noise. ``fair_gpus`` is a power of two, as configurations are.
    """

    hardware: Hardware
    present: Present
    job: Ints
    kind: Ints
    nodes: Ints
    gpus: Ints
    width: Ints
    goodput: Floats
    keeps: Bools
    entry_option: Ints
    entry_row: Ints
    entry_amount: Ints
    limit: Ints
    fair: Floats
    fair_gpus: int
    now: Floats
    fitted: Bools
    at_m0: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shapes:
    """Configurations of one GPU type: nodes, GPUs, and the width of nodes that are taken whole, else 0."""

    nodes: Ints
    gpus: Ints
    width: Ints


def options_of(snapshot: Snapshot, *, padded: bool = False, noise_growth: Floats | float = 1.0) -> Options:
    """The options of a snapshot with at least one job and one GPU.

    A count that is no power of two takes just as much, though it may not fit for that; ``padded``, the next
    power of two, and so always fits. Goodput is that of jobs whose noise scale has grown by ``noise_growth``
    (J).
    """
    jobs = snapshot.jobs
    hardware, present = _survey(snapshot)
    num_jobs, total = len(jobs), hardware.total
    least = np.array([job.min_gpus for job in jobs], dtype=np.int64)
    most = np.array([min(job_limit(job), total) for job in jobs], dtype=np.int64)
    columns: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
    allowed = np.array(
        [[not job.gpu_types or name in job.gpu_types for name in hardware.types] for job in jobs]
    )
    for kind, name in enumerate(hardware.types):
        unit = _units(jobs, name)
        usable = allowed[:, kind] & ~present.pinned
        shapes = _shapes(hardware, kind, int(most.max(initial=0)))
        fits = (shapes.gpus >= least[:, None]) & (shapes.gpus <= most[:, None])
        fits &= (shapes.gpus % unit[:, None] == 0) & usable[:, None]
        extra = _extra(
            hardware, kind, present, np.where(usable & (least <= most), least, 0), unit, ~np.any(fits, axis=1)
        )
        row, column = np.nonzero(fits)
        chosen = (row, shapes.nodes[column], shapes.gpus[column], shapes.width[column])
        merged = [np.concatenate(pair) for pair in zip(chosen, extra, strict=True)]
        columns.append((merged[0], np.full(len(merged[0]), kind), merged[1], merged[2], merged[3]))
    job, kinds, nodes, gpus, width = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    models = models_of(jobs, hardware.types)
    models = replace(models, noise=models.noise * noise_growth)
    units = np.stack([_units(jobs, name) for name in hardware.types], axis=1)
    goodput = goodputs(models, job, kinds, nodes, np.maximum(gpus // units[job, kinds], 1))
    use = np.flatnonzero(goodput > 0)
    use = use[np.lexsort((gpus[use], kinds[use], job[use]))]
    job, kinds, nodes, gpus, width = [each[use] for each in (job, kinds, nodes, gpus, width)]
    goodput = goodput[use]
    keeps = present.regular[job] & (present.kind[job] == kinds)
    keeps &= (present.nodes[job] == nodes) & (present.gpus[job] == gpus)
    option, rows, amount, limit = _capacity(hardware, kinds, nodes, gpus, width, padded=padded)
    quota = _quotas(snapshot, present, job, gpus, len(limit))
    fair_gpus = 2 ** int(np.log2(-(-total // num_jobs)))
    fair = np.zeros(num_jobs)
    everyone = np.arange(num_jobs)
    for kind in range(len(hardware.types)):
        share = np.maximum(fair_gpus, least)
        spans = -(-share // max(int(hardware.width[hardware.kind == kind].max(initial=1)), 1))
        replicas = np.maximum(share // units[:, kind], 1)
        own = goodputs(models, everyone, np.full(num_jobs, kind), spans, replicas)
        fair = np.maximum(fair, np.where(allowed[:, kind], own, 0.0))
    now = goodputs(
        models,
        everyone,
        present.kind,
        np.maximum(present.nodes, 1),
        np.maximum(present.gpus // units[everyone, present.kind], 1),
    )
    return Options(
        hardware=hardware,
        present=present,
        job=job,
        kind=kinds,
        nodes=nodes,
        gpus=gpus,
        width=width,
        goodput=goodput,
        keeps=keeps,
        entry_option=np.concatenate([option, quota[0]]),
        entry_row=np.concatenate([rows, quota[1]]),
        entry_amount=np.concatenate([amount, quota[2]]),
        limit=np.concatenate([limit, quota[3]]),
        fair=np.where(fair > 0, fair, 1.0),
        fair_gpus=fair_gpus,
        now=np.where(present.gpus > 0, now, 0.0),
        fitted=models.known,
        at_m0=models.fitted & ~models.known,
    )


def is_reserved(job: Job, now_unix_s: float) -> bool:
    """Whether the job has first claim on its least GPUs at this time."""
    begins, ends = job.reserved_from_unix_s, job.reserved_until_unix_s
    if begins is None and ends is None:
        return False
    return (begins is None or begins <= now_unix_s) and (ends is None or now_unix_s < ends)


def _survey(snapshot: Snapshot) -> tuple[Hardware, Present]:
    types = tuple(sorted({node.gpu_type for node in snapshot.nodes}))
    kind_of = {name: index for index, name in enumerate(types)}
    index_of = {node.name: index for index, node in enumerate(snapshot.nodes)}
    kind = np.array([kind_of[node.gpu_type] for node in snapshot.nodes], dtype=np.int64)
    width = np.array([node.gpus for node in snapshot.nodes], dtype=np.int64)
    free, whole = width.copy(), width > 0
    num_jobs = len(snapshot.jobs)
    kinds, nodes, gpus = (np.zeros(num_jobs, dtype=np.int64) for _ in range(3))
    pinned, regular = np.zeros(num_jobs, dtype=np.bool_), np.zeros(num_jobs, dtype=np.bool_)
    standing = standing_jobs(snapshot)
    for row, job in enumerate(snapshot.jobs):
        if job.job_id not in standing:
            continue
        where = [index_of[name] for name in job.placement]
        counts = list(job.placement.values())
        kinds[row], nodes[row], gpus[row] = kind[where[0]], len(where), sum(counts)
        reserved = gpus[row] >= job.min_gpus and is_reserved(job, snapshot.now_unix_s)
        pinned[row] = not job.preemptible or reserved or job.restarting
        widths = {int(width[index]) for index in where}
        packed = len(where) == 1 or (len(widths) == 1 and -(-int(gpus[row]) // min(widths)) == len(where))
        regular[row] = packed and job.min_gpus <= gpus[row] <= job.max_gpus
        if pinned[row]:
            free[where] -= counts
            whole[where] = False
    present = Present(kind=kinds, nodes=nodes, gpus=gpus, pinned=pinned, regular=regular & ~pinned)
    return Hardware(types=types, kind=kind, width=width, free=free, whole=whole), present


def _units(jobs: tuple[Job, ...], name: str) -> Ints:
    """GPUs that one replica of each job takes on a type."""
    return np.array(
        [
            job.gpus_per_replica_of.get(name, job.gpus_per_replica) if job.kind == "hybrid_parallel" else 1
            for job in jobs
        ],
        dtype=np.int64,
    )


def _shapes(hardware: Hardware, kind: int, most: int) -> _Shapes:
    of_kind = hardware.kind == kind
    largest = int(hardware.free[of_kind].max(initial=0))
    single = [2**power for power in range(largest.bit_length())]
    pools, sizes = np.unique(hardware.width[of_kind & hardware.whole], return_counts=True)
    single += [int(width) for width in pools if width & (width - 1)]
    triples = [(1, gpus, 0) for gpus in sorted(set(single)) if gpus <= most]
    for width, size in zip(pools.tolist(), sizes.tolist(), strict=True):
        count = 2
        while count <= size and count * width <= most:
            triples.append((count, count * width, width))
            count += 1 if count < _DENSE_NODES else count // 8
    nodes, gpus, widths = np.array(triples, dtype=np.int64).reshape(-1, 3).T
    return _Shapes(nodes=nodes, gpus=gpus, width=widths)


def _extra(
    hardware: Hardware, kind: int, present: Present, least: Ints, unit: Ints, lacking: Bools
) -> tuple[Ints, Ints, Ints, Ints]:
    """Least counts of jobs that the shapes leave without any, and today's counts that are no shape."""
    of_kind = hardware.kind == kind
    largest = int(hardware.free[of_kind].max(initial=0))
    pools, sizes = np.unique(hardware.width[of_kind & hardware.whole], return_counts=True)
    found = []
    for job in np.flatnonzero(lacking & (least > 0) & (least % unit == 0)):
        count = int(least[job])
        if count <= largest:
            found.append((job, 1, count, 0))
            continue
        for width, size in zip(pools.tolist(), sizes.tolist(), strict=True):
            nodes = -(-count // width)
            if 1 < nodes <= size:
                found.append((job, nodes, count, width))
    known = {(job, nodes, gpus) for job, nodes, gpus, _ in found}
    held = present.regular & (present.kind == kind) & (present.nodes == 1) & (least > 0)
    odd = (present.gpus & (present.gpus - 1)) > 0
    odd &= ~np.isin(present.gpus, pools)
    for job in np.flatnonzero(held & odd & (present.gpus % unit == 0)):
        if (job, 1, int(present.gpus[job])) not in known:
            found.append((job, 1, int(present.gpus[job]), 0))
    rows, nodes, gpus, widths = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return rows, nodes, gpus, widths


def _capacity(
    hardware: Hardware, kind: Ints, nodes: Ints, gpus: Ints, width: Ints, *, padded: bool
) -> tuple[Ints, Ints, Ints, Ints]:
    """Entries (option, row, amount) and the limit of each row.

    Powers of two fit into virtual nodes of sizes that are powers of two if, for each size, those of at
    least that size take no more GPUs than virtual nodes of at least that size have. Only sizes above the
    smallest virtual node need a row of their own. What a job leaves of the last node that it spans serves
    jobs within a node. Jobs that span nodes, and where ``padded`` those that take one whole whose GPUs are no
    power of two, take no more nodes of a width than there are. Where ``padded`` a count whose next power of
    two fits nowhere counts as one of the largest nodes, and there are no more of those than nodes that have
    so many GPUs.
    """
    options, rows, amounts, limits = [], [], [], []
    for index in range(len(hardware.types)):
        mine = np.flatnonzero(kind == index)
        of_kind = hardware.kind == index
        free = hardware.free[of_kind]
        pools, counts = np.unique(hardware.width[of_kind & hardware.whole], return_counts=True)
        largest = int(free.max(initial=0))
        size = gpus[mine].copy()
        if padded:
            power = 2 ** np.ceil(np.log2(np.maximum(size, 1))).astype(np.int64)
            alone = (power > largest) & (width[mine] == 0) & ~np.isin(size, pools)
            for count in np.unique(size[alone]).tolist():
                taking = (alone | np.isin(size, pools) | (width[mine] > 0)) & (
                    np.where(width[mine] > 0, width[mine], size) >= count
                )
                limits.append(int(np.count_nonzero(free >= count)))
                options.append(mine[taking])
                amounts.append(nodes[mine[taking]])
                rows.append(np.full(len(options[-1]), len(limits) - 1))
            size = np.where(np.isin(size, pools), size, np.where(alone, largest, power))
        size = np.where(width[mine] > 0, width[mine], size)
        times = np.where(width[mine] > 0, nodes[mine], 1)
        left = np.where(width[mine] > 0, width[mine] * nodes[mine] - gpus[mine], 0)
        parts = np.concatenate([free[free > 0], left[left > 0]])
        smallest = int(np.min(parts & -parts, initial=2**40))
        for exponent in range(largest.bit_length()):
            level = 2**exponent
            if exponent and level <= smallest:
                continue
            amount = times * (size - size % level) - (left - left % level)
            limits.append(int((free - free % level).sum()))
            options.append(mine[amount > 0])
            amounts.append(amount[amount > 0])
            rows.append(np.full(len(options[-1]), len(limits) - 1))
        if len(pools) > 1 or np.any(of_kind & ~hardware.whole & (hardware.width > 0)):
            for pool, count in zip(pools.tolist(), counts.tolist(), strict=True):
                whole = width[mine] == pool
                if padded and pool & (pool - 1):
                    whole |= (width[mine] == 0) & (gpus[mine] == pool)
                taking = mine[whole]
                limits.append(count)
                options.append(taking)
                amounts.append(nodes[taking])
                rows.append(np.full(len(taking), len(limits) - 1))
    joined = [
        np.concatenate([*parts, np.zeros(0, np.int64)]).astype(np.int64) for parts in (options, rows, amounts)
    ]
    return joined[0], joined[1], joined[2], np.array(limits, dtype=np.int64)


def _quotas(
    snapshot: Snapshot, present: Present, job: Ints, gpus: Ints, first_row: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """The same for the quotas of teams, less what their pinned jobs hold."""
    options, rows, limits = [], [], []
    for team, quota in sorted(snapshot.quotas.items()):
        member = np.array([each.team == team for each in snapshot.jobs], dtype=np.bool_)
        limits.append(max(quota - int(present.gpus[member & present.pinned].sum()), 0))
        options.append(np.flatnonzero(member[job]))
        rows.append(np.full(len(options[-1]), first_row + len(limits) - 1))
    none = np.zeros(0, dtype=np.int64)
    option = np.concatenate([*options, none])
    return option, np.concatenate([*rows, none]), gpus[option], np.array(limits, dtype=np.int64)
