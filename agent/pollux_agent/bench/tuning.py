"""Measurements behind ``pollux-agent bench tune``."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from pollux_agent.model.goodput import BatchLimits, GoodputModel, best_of_jobs
from pollux_agent.model.throughput import ThroughputParams

NODES, REPLICAS, JOBS = 16, 64, 100
"""The table: every number of nodes with every number of replicas, for this many jobs."""
CONFIGURATIONS = 1000
"""Random jobs and placements whose best split is compared with every split there is."""
_ROUNDS = 7
_MOST_SPLITS = 5_000_000


def random_model(rng: np.random.Generator) -> GoodputModel:
    """A job as it might be: times and noise over many decades, limits of any proportion."""
    seconds = 10.0 ** rng.uniform([-3, -5, -4, -6, -4, -6], [0, -2, 0, -2, 0, -2])
    params = ThroughputParams(
        alpha_grad=float(seconds[0]),
        beta_grad=float(seconds[1]),
        alpha_sync_local=float(seconds[2]),
        beta_sync_local=float(seconds[3]),
        alpha_sync_node=float(seconds[4]),
        beta_sync_node=float(seconds[5]),
        gamma=float(rng.uniform(1, 10)),
    )
    initial = int(10 ** rng.uniform(0.5, 2.5))
    least = int(rng.integers(1, max(2, initial // 8)))
    limits = BatchLimits(
        initial_batch_size=initial,
        max_batch_size=int(initial * 10 ** rng.uniform(0, 1.5)),
        max_local_batch_size=least + int(10 ** rng.uniform(0, 2.5)),
        min_local_batch_size=least,
    )
    return GoodputModel(params, float(initial * 10 ** rng.uniform(-2, 4)), limits)


def highest_goodput(model: GoodputModel, num_nodes: int, num_replicas: int) -> float:
    """The highest goodput over all whole (m, s) that the limits allow, by trying each; 0 if there is none."""
    limits = model.limits
    local = np.arange(limits.min_local_batch_size, limits.max_local_batch_size + 1)
    steps = np.arange(limits.max_batch_size // (num_replicas * limits.min_local_batch_size))
    best = 0.0
    for chunk in np.array_split(local, max(1, local.size * steps.size // _MOST_SPLITS)):
        batch = num_replicas * chunk[:, None] * (steps + 1)
        legal = (batch >= limits.initial_batch_size) & (batch <= limits.max_batch_size)
        if num_replicas == 1:
            most_alone = max(limits.initial_batch_size, limits.min_local_batch_size)
            legal &= (batch <= most_alone) | (steps >= 1)
        goodput = model.goodput(num_nodes, num_replicas, chunk[:, None], steps)
        best = max(best, float(np.max(goodput, where=legal, initial=0.0)))
    return best


def worst_regret(count: int, rng: np.random.Generator) -> float:
    """Largest share of the highest goodput that the search misses, over random jobs and placements."""
    worst = 0.0
    for _ in range(count):
        model = random_model(rng)
        replicas = int(rng.integers(1, REPLICAS + 1))
        nodes = int(rng.integers(1, min(replicas, NODES) + 1))
        highest = highest_goodput(model, nodes, replicas)
        if highest > 0:
            worst = max(worst, 1.0 - float(model.best(nodes, replicas).goodput) / highest)
    return worst


def measure(*, seed: int = 0) -> dict[str, float]:
    """The figures of the command; times are medians, in seconds of one core."""
    rng = np.random.default_rng(seed)
    models = [random_model(rng) for _ in range(JOBS)]
    nodes, replicas = np.arange(1, NODES + 1)[:, None], np.arange(1, REPLICAS + 1)
    table_s = _median_s([partial(model.best, nodes, replicas) for model in models])
    single_s = _median_s([partial(model.best, 2, 8) for model in models])
    all_s = _median_s([partial(best_of_jobs, models, nodes, replicas)] * _ROUNDS)
    spans = np.where(replicas > 1, 2, 1)
    distinct_s = _median_s([partial(best_of_jobs, models, spans, replicas)] * _ROUNDS)
    return {
        "table_ms": 1e3 * table_s,
        "single_ms": 1e3 * single_s,
        "pairs_per_s": JOBS * NODES * REPLICAS / all_s,
        "searched_per_s": JOBS * REPLICAS / distinct_s,
        "regret_max": worst_regret(CONFIGURATIONS, rng),
    }


def _median_s(tasks: list[Callable[[], object]]) -> float:
    tasks[0]()
    seconds = []
    for task in tasks:
        began = time.process_time()
        task()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)
