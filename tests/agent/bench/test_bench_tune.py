"""``pollux-agent bench tune``: its regret; the times are for the command, not for a test."""

import json

import numpy as np
from typer.testing import CliRunner

from pollux_agent.bench.tuning import highest_goodput, random_model
from pollux_agent.cli import app


def test_the_search_misses_at_most_half_a_percent_of_the_best() -> None:
    done = CliRunner().invoke(app, ["bench", "tune", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert 0 <= figures["regret_max"] <= 0.005
    assert {"table_ms", "single_ms", "pairs_per_s"} <= set(figures)
    assert all(value >= 0 for value in figures.values())


def test_what_it_compares_with_is_every_split() -> None:
    """Against plain loops, on small random jobs."""
    rng = np.random.default_rng(4)
    compared = 0
    while compared < 20:
        model = random_model(rng)
        limits, replicas = model.limits, int(rng.integers(1, 5))
        if limits.max_batch_size > 120 or limits.max_local_batch_size > 120:
            continue
        best = 0.0
        for local in range(limits.min_local_batch_size, limits.max_local_batch_size + 1):
            for pieces in range(1, limits.max_batch_size // (local * replicas) + 1):
                batch = local * pieces * replicas
                alone = replicas == 1 and pieces == 1
                if batch < limits.initial_batch_size or (
                    alone and local > max(limits.initial_batch_size, limits.min_local_batch_size)
                ):
                    continue
                best = max(best, float(model.goodput(1, replicas, local, pieces - 1)))
        assert highest_goodput(model, 1, replicas) == best
        compared += 1
