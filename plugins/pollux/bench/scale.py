"""How long one decision takes on clusters of any size, and how near the optimum it is.

The snapshots are seeded: three types of GPU in the proportions of Sia section 4.3, about 0.6 jobs a GPU, most
of them running, of different models, ages and sizes.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated

import numpy as np
from numpy.random import Generator
from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.errors import ConfigError
from pollux.plan import plan
from pollux.policy import decide, ours, sia
from pollux.policy.assign import Choice, Relaxed, choose, relax
from pollux.policy.outcome import Instance
from pollux.snapshot import Job, Node, PolicySettings, Snapshot
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol import DOCUMENT_CONFIG

PROGRAMS: Mapping[str, Callable[[Snapshot], Instance]] = {"sia": sia.formulate, "ours": ours.formulate}
"""Policies that solve a program, whose linear relaxation bounds what they find."""

JOBS_PER_GPU = 0.6
SMALLEST, LARGEST = 64, 65_536
"""Beyond the largest the relaxation would take longer than solvers may, and there is no bound."""

_TYPES = (("a", 4, 6, 1.0), ("b", 8, 2, 3.5), ("c", 8, 3, 1.7))
"""Name, GPUs a node, nodes in each 64 GPUs, and speed of a GPU."""

_NEW_SHARE = 0.1
_REPEATS = 3


_Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Measured:
    """One policy on one snapshot.

    ``decide_s`` is from the snapshot in memory to the plan, ``lp_s`` HiGHS alone on the linear relaxation of
    the same program; medians of a few repeats, in seconds of one core, which other work on the machine does
    not lengthen much. ``objective_ratio`` is what the choice gains against the bound that the relaxation
    gives, None where its solver had to be ended.
    """

    gpus: Annotated[int, Field(ge=SMALLEST)]
    jobs: Annotated[int, Field(ge=1)]
    policy: str
    decide_s: _Seconds
    lp_s: _Seconds
    objective_ratio: Annotated[float, Field(ge=0)] | None


def check_size(gpus: int) -> None:
    """Raise ConfigError for a size of cluster that cannot be measured."""
    if gpus % SMALLEST or not SMALLEST <= gpus <= LARGEST:
        raise ConfigError(f"--gpus has {gpus}; use multiples of {SMALLEST} from {SMALLEST} to {LARGEST}")


def measure(gpus: tuple[int, ...], *, policies: tuple[str, ...], seed: int) -> Iterator[Measured]:
    """Measure every policy on a cluster of each size; raises ConfigError as :func:`check_size` does."""
    for size in gpus:
        check_size(size)
    for size in gpus:
        snapshot = make_snapshot(size, seed=seed)
        for name in policies:
            yield _measure(snapshot, size, name)


def make_snapshot(gpus: int, *, seed: int) -> Snapshot:
    """A busy cluster of that many GPUs; raises ConfigError as :func:`check_size` does."""
    check_size(gpus)
    rng = np.random.default_rng((seed, gpus))
    nodes = tuple(
        Node(name=f"{kind}-{index}", gpus=width, gpu_type=kind)
        for kind, width, count, _ in _TYPES
        for index in range(count * gpus // SMALLEST)
    )
    free = {kind: {node.name: node.gpus for node in nodes if node.gpu_type == kind} for kind, *_ in _TYPES}
    jobs = tuple(_job(rng, index, free) for index in range(round(JOBS_PER_GPU * gpus)))
    return Snapshot(decision=1, now_unix_s=1e9, interval_s=60.0, nodes=nodes, jobs=jobs)


def _measure(snapshot: Snapshot, gpus: int, policy: str) -> Measured:
    snapshot = replace(snapshot, policy=PolicySettings(name=policy))
    instance = PROGRAMS[policy](snapshot)
    decided, relaxed = [], []
    for _ in range(_REPEATS):
        gc.collect()
        begin_s = time.process_time()
        plan(snapshot, decide(snapshot))
        decided.append(time.process_time() - begin_s)
        begin_s, begin_wall_s = time.process_time(), time.perf_counter()
        bound = relax(instance.options, instance.gain, must=instance.must)
        share = (time.process_time() - begin_s) / max(time.perf_counter() - begin_wall_s, 1e-9)
        relaxed.append(bound.solver_s * min(share, 1.0))  # HiGHS tells its wall-clock time
    choice = choose(instance.options, instance.gain, must=instance.must)
    return Measured(
        gpus=gpus,
        jobs=len(snapshot.jobs),
        policy=policy,
        decide_s=float(np.median(decided)),
        lp_s=float(np.median(relaxed)),
        objective_ratio=_ratio(choice, bound),
    )


def _ratio(choice: Choice, bound: Relaxed) -> float | None:
    if bound.cut_short:
        return None
    return choice.gain / bound.objective if bound.objective else 1.0


def _job(rng: Generator, index: int, free: Mapping[str, dict[str, int]]) -> Job:
    """A job of a random model, running on a power of two GPUs where those are free; some are new."""
    initial = int(2 ** rng.integers(3, 8))
    beta = 10 ** rng.uniform(-3.5, -1.5)
    sync = beta * initial * 10 ** rng.uniform(-1.5, 0.0)
    new = rng.random() < _NEW_SHARE
    kind, _, _, _ = _TYPES[rng.choice(3, p=[0.375, 0.25, 0.375])]
    placement = {} if new else _placement(rng, free[kind])
    held = sum(placement.values())
    seen = max(held, int(2 ** rng.integers(0, 5)))
    return Job(
        job_id=f"job-{index}",
        max_gpus=64,
        initial_batch_size=initial,
        max_batch_size=initial * 32,
        max_local_batch_size=initial * 2,
        placement=placement,
        age_s=0.0 if new else float(rng.lognormal(8.0, 1.2)),
        restarts=0 if new else int(rng.poisson(2.0)),
        restart_s=None if new else float(rng.uniform(15.0, 120.0)),
        max_gpus_seen=0 if new else seen,
        fits={
            name: drawn_params(beta / (speed * rng.lognormal(0.0, 0.2)), sync, initial)
            for name, *_, speed in _TYPES
        },
        noise_scale=None if new else float(initial * 10 ** rng.uniform(0.0, 2.5)),
        progress=0.0,
        target_progress=float(rng.lognormal(8.5, 1.5)),
        gpus_seen={} if new else {kind: seen},
    )


def drawn_params(beta: float, sync: float, initial: int) -> ThroughputParams:
    """Of a job that takes ``beta`` seconds a sample and ``sync`` to average over two GPUs of a node."""
    return ThroughputParams(
        alpha_grad=0.2 * beta * initial,
        beta_grad=beta,
        alpha_sync_local=sync,
        beta_sync_local=0.02 * sync,
        alpha_sync_node=3.0 * sync,
        beta_sync_node=0.05 * sync,
        gamma=2.0,
    )


def _placement(rng: Generator, free: dict[str, int]) -> dict[str, int]:
    """1, 2 or 4 GPUs of the first of a few nodes that has so many free; else nothing."""
    gpus = int(rng.choice([1, 2, 4], p=[0.6, 0.3, 0.1]))
    names = list(free)
    for name in (names[int(where)] for where in rng.integers(len(names), size=8)):
        if free[name] >= gpus:
            free[name] -= gpus
            return {name: gpus}
    return {}
