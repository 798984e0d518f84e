"""One decision on 64 GPUs, ours against AdaptDL's search for the same fitness on the same snapshots."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.random import Generator
from threadpoolctl import threadpool_limits

from pollux.bench.scale import drawn_params
from pollux.policy import decide
from pollux.policy.problem import SPEEDUP_FLOOR, Ints, Problem, formulate
from pollux.snapshot import Job, Node, PolicySettings, Snapshot
from pollux_agent.bench.peers import ask_peer

NODES, WIDTH = 16, 4
MOST_JOBS = 1_000
BARS = {"pollux": 0.2, "ours": 0.02}
"""A decision's seconds over the peer's, at most, by policy."""

_ROUNDING = 1e-6
PEER_ROUNDS = 3
"""A round starts from the population of the one before, which is to the peer's advantage."""

SCRIPT = Path(__file__).with_name("peer_search.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One decision from nothing remembered; CPU seconds of one core, and FITNESS_p (Pollux Eq. 14) of each.

    ``peer_*`` are AdaptDL's, None without it: the median of its rounds, and the fitness after the last one.
    """

    jobs: int
    fairness_p: float
    seed: int
    policy: str
    decide_s: float
    fitness: float
    peer_s: float | None
    peer_fitness: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A policy on the snapshots of one number of jobs and one p: medians, and the worst ratio of fitness.

    ``met`` is None without the peer. Only ``pollux`` looks for this fitness and is held to it.
    """

    jobs: int
    fairness_p: float
    policy: str
    decide_s: float
    time_ratio: float | None
    bar: float
    fitness_ratio: float | None

    @property
    def met(self) -> bool | None:
        if self.time_ratio is None or self.fitness_ratio is None:
            return None
        good = self.policy != "pollux" or self.fitness_ratio >= 1 - _ROUNDING
        return good and self.time_ratio <= self.bar


def judge(rows: Sequence[Compared]) -> list[Verdict]:
    """The rows of each number of jobs, p and policy together, against the policy's bar."""
    groups: dict[tuple[int, float, str], list[Compared]] = {}
    for row in rows:
        groups.setdefault((row.jobs, row.fairness_p, row.policy), []).append(row)
    verdicts = []
    for (jobs, p, policy), same in groups.items():
        times = [row.decide_s / row.peer_s for row in same if row.peer_s]
        quality = [row.fitness / row.peer_fitness for row in same if row.peer_fitness]
        verdicts.append(
            Verdict(
                jobs=jobs,
                fairness_p=p,
                policy=policy,
                decide_s=median(row.decide_s for row in same),
                time_ratio=median(times) if times else None,
                bar=BARS[policy],
                fitness_ratio=min(quality, default=None),
            )
        )
    return verdicts


def compare(
    jobs: tuple[int, ...], *, fairness_p: tuple[float, ...], seeds: int, peer: Path | None
) -> Iterator[Compared]:
    """Each policy on ``seeds`` snapshots of each number of jobs and p; ``peer`` is the peers' interpreter.

    Raises subprocess.CalledProcessError if the peer fails.
    """
    for count, p, seed in product(jobs, fairness_p, range(seeds)):
        snapshot = make_snapshot(count, fairness_p=p, seed=seed)
        problem = formulate(snapshot)
        peer_s = peer_fitness = None
        if peer is not None:
            theirs = ask_peer(peer, SCRIPT, [question(snapshot, problem, seed=seed)])[0]
            peer_s = median(theirs["seconds"])
            peer_fitness = fitness(problem, _matrix(snapshot, theirs["allocations"]))
        for policy in BARS:
            decide_s, matrix = _decided(snapshot, policy)
            yield Compared(
                jobs=count,
                fairness_p=p,
                seed=seed,
                policy=policy,
                decide_s=decide_s,
                fitness=fitness(problem, matrix),
                peer_s=peer_s,
                peer_fitness=peer_fitness,
            )


def fitness(problem: Problem, matrix: Ints) -> float:
    """FITNESS_p of one allocation, REALLOC_FACTOR included."""
    return float(problem.rank(matrix[None])[1][0])


def make_snapshot(jobs: int, *, fairness_p: float = -1.0, seed: int) -> Snapshot:
    """A cluster of 64 GPUs on which ``jobs`` fitted jobs of different models, ages and sizes run or wait."""
    rng = np.random.default_rng((seed, jobs))
    nodes = tuple(Node(name=f"n{index}", gpus=WIDTH) for index in range(NODES))
    free = {node.name: node.gpus for node in nodes}
    return Snapshot(
        decision=1,
        now_unix_s=1e9,
        interval_s=60.0,
        policy=PolicySettings(name="pollux", fairness_p=fairness_p, seed=seed),
        nodes=nodes,
        jobs=tuple(_job(rng, index, free) for index in range(jobs)),
    )


def question(snapshot: Snapshot, problem: Problem, *, seed: int) -> Mapping[str, Any]:
    """What the peer is asked: the snapshot's jobs and nodes, and the constants of the fitness."""
    fair_nodes = -(-problem.fair_gpus // WIDTH)
    return {
        "seed": seed,
        "fairness_p": problem.fairness_p,
        "floor": SPEEDUP_FLOOR,
        "width": WIDTH,
        "rounds": PEER_ROUNDS,
        "nodes": {node.name: node.gpus for node in snapshot.nodes},
        "jobs": [
            {
                "job_id": job.job_id,
                "params": asdict(job.fits["gpu"]),
                "noise_scale": job.noise_scale,
                "initial_batch_size": job.initial_batch_size,
                "max_batch_size": job.max_batch_size,
                "min_local_batch_size": job.min_local_batch_size,
                "max_local_batch_size": job.max_local_batch_size,
                "max_replicas": int(most),
                "placement": dict(job.placement),
                "fair_nodes": fair_nodes,
                "fair_gpus": problem.fair_gpus,
                "factor": float(factor),
            }
            for job, most, factor in zip(snapshot.jobs, problem.most, problem.factor, strict=True)
        ],
    }


def _decided(snapshot: Snapshot, policy: str) -> tuple[float, Ints]:
    asked = replace(snapshot, policy=replace(snapshot.policy, name=policy))
    with threadpool_limits(limits=1):
        began = time.process_time()
        decision = decide(asked)
        seconds = time.process_time() - began
    held = {
        job_id: [name for name, gpus in job.placement.items() for _ in range(gpus)]
        for job_id, job in decision.jobs.items()
    }
    return seconds, _matrix(snapshot, held)


def _matrix(snapshot: Snapshot, allocations: Mapping[str, list[str]]) -> Ints:
    """GPUs per job and node, from a list of a node's name for each GPU."""
    column = {node.name: index for index, node in enumerate(snapshot.nodes)}
    matrix = np.zeros((len(snapshot.jobs), len(snapshot.nodes)), dtype=np.int64)
    for row, job in enumerate(snapshot.jobs):
        for name in allocations.get(job.job_id, []):
            matrix[row, column[name]] += 1
    return matrix


def _job(rng: Generator, index: int, free: dict[str, int]) -> Job:
    """A fitted job on up to four GPUs of a node that has them, or waiting."""
    initial = int(2 ** rng.integers(4, 9))
    beta = 10 ** rng.uniform(-3.5, -2.0)
    sync = beta * initial * 10 ** rng.uniform(-1.5, 0.0)
    wish = int(rng.choice([0, 1, 2, 4], p=[0.2, 0.4, 0.25, 0.15]))
    node = next((name for name, gpus in free.items() if gpus >= wish > 0), None)
    if node is not None:
        free[node] -= wish
    return Job(
        job_id=f"job-{index}",
        max_gpus=64,
        initial_batch_size=initial,
        max_batch_size=initial * 64,
        max_local_batch_size=initial * 2,
        min_local_batch_size=max(initial // 16, 1),
        placement={} if node is None else {node: wish},
        age_s=float(rng.lognormal(8.0, 1.0)),
        restarts=int(rng.poisson(2.0)),
        restart_s=float(rng.uniform(15.0, 60.0)),
        max_gpus_seen=int(2 ** rng.integers(2, 6)),
        fits={"gpu": drawn_params(beta, sync, initial)},
        noise_scale=float(initial * 10 ** rng.uniform(0.0, 2.5)),
        target_progress=float(rng.lognormal(8.5, 1.0)),
        gpus_seen={"gpu": 4},
    )
