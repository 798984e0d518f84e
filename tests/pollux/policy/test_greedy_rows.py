"""The greedy start judges a matrix by the one row that differs: as the whole of it would be judged."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_builder import snapshots

from pollux.policy.problem import formulate
from pollux.snapshot import Snapshot


@given(snapshot=snapshots(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=150)
def test_one_row_is_judged_as_the_whole_matrix_and_keeps_it_legal(snapshot: Snapshot, seed: int) -> None:
    if not snapshot.jobs or not any(node.gpus for node in snapshot.nodes):
        return
    problem, rng = formulate(snapshot), np.random.default_rng(seed)
    wild = rng.integers(0, 5, size=(1, *problem.shape)) * (rng.random((1, *problem.shape)) < 0.5)
    current = problem.repair(wild, rng.random(wild.shape[:2]))[0]
    jobs = rng.integers(problem.shape[0], size=12)
    wish = np.minimum(rng.integers(1, 9, size=12), problem.most[jobs])
    rows = problem.rows(current, jobs, wish, rng.integers(problem.num_types, size=12))
    whole = np.repeat(current[None], 12, axis=0)
    whole[np.arange(12), jobs] = rows
    assert np.array_equal(problem.repair(whole, rng.random(whole.shape[:2])), whole)
    order, _ = problem.rank(np.concatenate([current[None], whole]))
    assert problem.best_row(current, jobs, rows) == order[0] - 1


@given(snapshot=snapshots(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=100)
def test_a_job_gets_what_it_asks_for_where_that_is_free_and_of_use(snapshot: Snapshot, seed: int) -> None:
    if not snapshot.jobs or not any(node.gpus for node in snapshot.nodes):
        return
    problem = formulate(snapshot)
    job = int(np.random.default_rng(seed).integers(problem.shape[0]))
    alone = np.where(problem.pinned[:, None], problem.present, 0)
    free = (problem.capacity - alone.sum(axis=0)) * problem.allowed[job] * (problem.node_type == 0)
    gpus = int(problem.least[job])
    (row,) = problem.rows(alone, np.array([job]), np.array([gpus]), np.array([0]))
    if problem.pinned[job]:
        assert np.array_equal(row, problem.present[job])
    elif gpus <= free.max() and problem.goodput[job, 0, 1, gpus] > 0:
        assert row.sum() == gpus and np.count_nonzero(row) == 1
