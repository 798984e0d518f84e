"""Measurements behind ``pollux-agent bench tune``."""

import statistics
import time

import numpy as np

from pollux_agent.model.goodput import BatchLimits, GoodputModel
from pollux_agent.model.throughput import ThroughputParams

NODES, REPLICAS = 16, 64
"""The table: every number of nodes with every number of replicas."""
ROUNDS = 7


def random_model(rng: np.random.Generator) -> GoodputModel:
    """A job as it might be: seconds over four decades, noise over six, limits of any proportion."""
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


def measure(*, seed: int = 0) -> dict[str, float]:
    """Median milliseconds of a whole table and of one allocation, pairs a second, and the worst regret."""
    rng = np.random.default_rng(seed)
    models = [random_model(rng) for _ in range(100)]
    nodes, replicas = np.arange(1, NODES + 1)[:, None], np.arange(1, REPLICAS + 1)
    table_s, single_s = [], []
    for model in models:
        began = time.perf_counter()
        model.best(nodes, replicas)
        table_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        model.best(2, 8)
        single_s.append(time.perf_counter() - began)
    table = statistics.median(table_s)
    return {
        "table_ms": 1e3 * table,
        "single_ms": 1e3 * statistics.median(single_s),
        "pairs_per_s": NODES * REPLICAS / table,
    }
