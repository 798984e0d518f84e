"""Autoscalers on models whose answer can be worked out by hand."""

import numpy as np
import pytest

from pollux.policy.autoscale import by_goodput, by_throughput
from pollux_agent.model.goodput import BatchLimits, GoodputModel
from pollux_agent.model.throughput import ThroughputParams

ENDLESS_NOISE = 1e15


def model(
    *, alpha: float = 0.0, beta: float = 0.01, sync_node: float = 0.0, noise: float = 0.0, most: int = 10**9
) -> GoodputModel:
    """T_iter = alpha + beta m + sync (gamma = 1), M0 = 64, at most 64 samples a GPU."""
    params = ThroughputParams(
        alpha_grad=alpha,
        beta_grad=beta,
        alpha_sync_local=0.0,
        beta_sync_local=0.0,
        alpha_sync_node=sync_node,
        beta_sync_node=0.0,
        gamma=1.0,
    )
    limits = BatchLimits(
        initial_batch_size=64, max_batch_size=most, max_local_batch_size=64, min_local_batch_size=1
    )
    return GoodputModel(params, noise, limits)


def test_perfect_scaling_takes_every_node() -> None:
    perfect = model(noise=ENDLESS_NOISE)
    assert by_goodput(perfect, 1, 4, 16) == 16
    assert by_throughput(perfect, 1, 4, 16) == 16


def test_what_nothing_was_measured_of_counts_as_perfect() -> None:
    unknown = GoodputModel.unfitted(model().limits)
    assert by_goodput(unknown, 1, 4, 8) == 8
    assert by_throughput(unknown, 1, 4, 8) == 8


def fixed_batch(sync_node: float) -> GoodputModel:
    """M = M0 = 5040 whatever the GPUs: one GPU takes 0.16 s, and n nodes of one GPU 0.16 / n + c."""
    params = ThroughputParams(
        alpha_grad=0.0,
        beta_grad=0.16 / 5040,
        alpha_sync_local=0.0,
        beta_sync_local=0.0,
        alpha_sync_node=sync_node,
        beta_sync_node=0.0,
        gamma=1.0,
    )
    limits = BatchLimits(
        initial_batch_size=5040, max_batch_size=5040, max_local_batch_size=5040, min_local_batch_size=1
    )
    return GoodputModel(params, 0.0, limits)


@pytest.mark.parametrize("sync_s", [0.015, 0.02, 0.05, 0.1, 0.16])
def test_with_a_fixed_batch_goodput_grows_to_where_half_of_the_ideal_is_left(sync_s: float) -> None:
    """The utility is 0.16 / (0.16 + n c) on n > 1 nodes."""
    counts = np.arange(2, 11)
    enough = counts[0.16 / (0.16 + counts * sync_s) >= 0.5]
    assert by_goodput(fixed_batch(sync_s), 1, 1, 10) == max(enough, default=1)


def test_between_the_two_bounds_a_job_stays_as_it_is() -> None:
    """Utility on n nodes is 0.16 / (0.16 + 0.02 n): 2/3 at n = 4, 1/2 at n = 8, 3/8 at n = 13.3."""
    job = fixed_batch(0.02)
    assert [by_goodput(job, nodes, 1, 16) for nodes in (2, 3)] == [8, 8]
    assert [by_goodput(job, nodes, 1, 16) for nodes in (5, 8, 10, 12)] == [5, 8, 10, 12]
    assert [by_goodput(job, nodes, 1, 16) for nodes in (14, 16)] == [8, 8]


def test_more_gradient_noise_never_asks_for_fewer_nodes() -> None:
    wanted = [
        by_goodput(model(alpha=0.05, sync_node=0.1, noise=noise), 1, 4, 16)
        for noise in np.geomspace(1, 1e6, 40)
    ]
    assert wanted == sorted(wanted)
    assert wanted[0] < wanted[-1] == 16


def test_throughput_does_not_see_the_noise() -> None:
    wanted = {
        by_throughput(model(alpha=0.05, sync_node=0.3, noise=noise), 2, 4, 16) for noise in (0.0, 1e3, 1e9)
    }
    assert len(wanted) == 1


def test_throughput_ends_where_a_node_more_adds_less_than_half_of_what_one_does() -> None:
    """Of at most 512 samples 8 GPUs are full; from 2 nodes on more GPUs only share them."""
    shared = model(sync_node=0.64, most=512)
    rate = [512 / (0.01 * (512 // (4 * nodes)) + 0.64) for nodes in range(2, 17)]
    gain = [
        (then - now) / (now / nodes) for nodes, now, then in zip(range(2, 17), rate, rate[1:], strict=False)
    ]
    want = 2 + next(index for index, value in enumerate(gain) if value < 0.5)
    assert by_throughput(shared, 2, 4, 16) == want
