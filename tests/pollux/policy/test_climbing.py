"""Uphill from one allocation: every step is legal and better, and who comes late moves few others about."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_builder import after_decision, make_job, make_snapshot, new_job, snapshots

from pollux.bench.search import make_snapshot as bench_snapshot
from pollux.policy import decide
from pollux.policy.climbing import climb
from pollux.policy.problem import all_matrices, formulate
from pollux.snapshot import Snapshot


@given(snapshot=snapshots(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=100)
def test_it_ends_no_lower_than_it_began_and_legal(snapshot: Snapshot, seed: int) -> None:
    if not snapshot.jobs or not any(node.gpus for node in snapshot.nodes):
        return
    problem, rng = formulate(snapshot), np.random.default_rng(seed)
    wild = rng.integers(0, 5, size=(1, *problem.shape)) * (rng.random((1, *problem.shape)) < 0.5)
    start = problem.repair(wild, rng.random(wild.shape[:2]))[0]
    top = climb(problem, start, rng)
    assert np.array_equal(problem.repair(top[None], rng.random((1, len(top)))), top[None])
    assert problem.rank(np.stack([start, top]))[0][0] == (0 if np.array_equal(start, top) else 1)


def test_gpus_pass_to_those_without_as_the_best_matrix_has_it() -> None:
    """One job holds everything and four have nothing: as good as the best of all matrices."""
    old = make_job("old", placement={"n0": 2, "n1": 2}, max_gpus=4)
    snapshot = make_snapshot(
        [old, *(make_job(f"new-{index}") for index in range(2))], nodes={"n0": 2, "n1": 2}
    )
    problem = formulate(snapshot)
    top = climb(problem, problem.present, np.random.default_rng(0))
    everything = all_matrices(problem, 100_000)
    assert everything is not None
    best = problem.rank(everything)[1].max()
    assert problem.rank(top[None])[1][0] == best


def test_one_job_more_on_a_full_cluster_restarts_few_others() -> None:
    """Forty jobs of different models on 64 GPUs, settled for some rounds; then there is another one."""
    snapshot = bench_snapshot(40, seed=3)
    for _ in range(4):
        snapshot = after_decision(snapshot, decide(snapshot))
    assert sum(job.num_gpus for job in snapshot.jobs) == 64
    late = replace(snapshot, jobs=(*snapshot.jobs, new_job("late", age_s=30.0, max_gpus=16)))
    decision = decide(late)
    assert decision.jobs["late"].placement
    moved = [job for job in snapshot.jobs if dict(decision.jobs[job.job_id].placement) != dict(job.placement)]
    assert len(moved) <= 4
