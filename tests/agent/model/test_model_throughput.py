"""Step times against values worked out by hand from Pollux Eq. 8-11."""

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest

from pollux_agent.model.throughput import ThroughputParams, grad_time, is_sane, step_time, sync_time

PARAMS = ThroughputParams(
    alpha_grad=3.0,
    beta_grad=0.01,
    alpha_sync_local=2.0,
    beta_sync_local=0.5,
    alpha_sync_node=3.0,
    beta_sync_node=0.25,
    gamma=2.0,
)


def test_a_pass_costs_a_constant_and_so_much_per_sample() -> None:
    assert grad_time(PARAMS, [0, 100, 200]).tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("nodes", "replicas", "want"),
    [(1, 1, 0.0), (1, 2, 2.0), (1, 4, 3.0), (2, 2, 3.0), (2, 4, 3.5), (3, 10, 5.0)],
    ids=["alone", "two on a node", "four on a node", "two on two", "four on two", "ten on three"],
)
def test_synchronisation_depends_on_replicas_and_on_crossing_nodes(
    nodes: int, replicas: int, want: float
) -> None:
    assert float(sync_time(PARAMS, nodes, replicas)) == want


def test_the_two_times_join_by_the_gamma_norm() -> None:
    # T_grad(100) = 4 and T_sync = 3 on two nodes: a right-angled triangle for gamma = 2
    assert float(step_time(PARAMS, 2, 2, 100)) == pytest.approx(5.0)
    assert float(step_time(replace(PARAMS, gamma=1.0), 2, 2, 100)) == pytest.approx(7.0)
    assert float(step_time(replace(PARAMS, gamma=10.0), 2, 2, 100)) == pytest.approx(
        (4.0**10 + 3.0**10) ** 0.1
    )


def test_each_accumulation_step_adds_one_pass_without_synchronisation() -> None:
    assert step_time(PARAMS, 2, 2, 100, [0, 1, 5]) == pytest.approx([5.0, 9.0, 25.0])


def test_arrays_broadcast_to_a_table() -> None:
    nodes, replicas = np.array([[1], [2]]), np.array([2, 4, 8])
    table = step_time(PARAMS, nodes, replicas, 50, 1)
    assert table.shape == (2, 3)
    assert table[1, 2] == pytest.approx(float(step_time(PARAMS, 2, 8, 50, 1)))


def test_no_overflow_at_the_edges_of_what_is_sane() -> None:
    slow = replace(PARAMS, alpha_grad=1e6, alpha_sync_node=1e6, gamma=10.0)
    assert float(step_time(slow, 2, 2, 1)) == pytest.approx(1e6 * 2**0.1, rel=1e-6)
    quick = replace(PARAMS, alpha_grad=0.0, beta_grad=1e-9, alpha_sync_local=0.0, beta_sync_local=0.0)
    assert float(step_time(quick, 1, 2, 1)) == pytest.approx(1e-9)


@pytest.mark.parametrize(
    "change",
    [
        {"alpha_grad": nan},
        {"beta_sync_node": inf},
        {"alpha_sync_local": -1e-9},
        {"gamma": 0.99},
        {"gamma": 10.01},
        {"beta_grad": 1e7},
        {"alpha_grad": 0.0, "beta_grad": 0.0},
    ],
)
def test_garbage_is_not_sane(change: dict[str, float]) -> None:
    assert is_sane(PARAMS)
    assert not is_sane(replace(PARAMS, **change))
