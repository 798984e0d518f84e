"""Pollux on several types of GPU: equal virtual nodes for the search, every rule kept on the real ones."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_builder import SCALES_WELL, make_job, make_snapshot, snapshots

from pollux.plan import check
from pollux.policy import climbing, decide
from pollux.policy import pollux as policy
from pollux.policy.breeding import Breeder
from pollux.policy.problem import Problem, all_matrices, formulate
from pollux.policy.virtual import common_size, cut
from pollux.snapshot import GoodputCurve, Job, Node, PolicySettings, Snapshot
from pollux_agent.model.goodput import BatchLimits, GoodputModel

SLOW = replace(SCALES_WELL, alpha_grad=0.05, beta_grad=0.01)
FITS = {"new": SCALES_WELL, "old": SLOW}


def mixed(jobs: list[Job], *nodes: tuple[int, str], **settings: Any) -> Snapshot:
    """The jobs on nodes n0, n1, ... of so many GPUs of a type."""
    named = tuple(
        Node(name=f"n{index}", gpus=gpus, gpu_type=kind) for index, (gpus, kind) in enumerate(nodes)
    )
    return replace(make_snapshot(jobs, policy=PolicySettings(name="pollux", **settings)), nodes=named)


def big_job(job_id: str = "job", **change: Any) -> Job:
    return make_job(job_id, **({"fits": FITS, "max_gpus": 16, "max_gpus_seen": 16} | change))


def goodput(job: Job, nodes: int, gpus: int) -> float:
    """Best goodput on the new type, straight from the model."""
    limits = BatchLimits(
        initial_batch_size=job.initial_batch_size,
        max_batch_size=job.max_batch_size,
        max_local_batch_size=job.max_local_batch_size,
    )
    return float(GoodputModel(SCALES_WELL, job.noise_scale, limits).best(nodes, gpus).goodput)


@pytest.mark.parametrize(
    ("nodes", "want"),
    [
        pytest.param([(4, "old"), (8, "new"), (8, "newer")], 4, id="Sia's cluster"),
        pytest.param([(4, "old"), (8, "new"), (16, "new")], 4, id="4, 8 and 16"),
        pytest.param([(8, "old"), (12, "new")], 4, id="neither divides the other"),
        pytest.param([(0, "old"), (8, "old"), (4, "new")], 4, id="a node without GPUs"),
        pytest.param([(3, "old"), (4, "new")], 0, id="no common divisor"),
        pytest.param([(1, "old"), (4, "new")], 0, id="a node of one GPU"),
        pytest.param([(8, "old"), (8, "new")], 0, id="equal nodes"),
        pytest.param([(4, "new"), (8, "new")], 0, id="one type"),
        pytest.param([(4, "new"), (8, "new"), (0, "old")], 0, id="one type that has GPUs"),
    ],
)
def test_the_size_of_a_virtual_node(nodes: list[tuple[int, str]], want: int) -> None:
    problem = formulate(mixed([big_job()], *nodes))
    assert common_size(problem) == want
    assert (cut(problem) is problem) == (want == 0)


def test_a_job_counts_as_spanning_nodes_beyond_a_virtual_one() -> None:
    job = big_job()
    problem = cut(formulate(mixed([job], (4, "old"), (8, "new"), (8, "new"))))
    rows = [[0, 4, 0], [0, 5, 0], [0, 8, 0], [0, 4, 4], [0, 8, 8]]
    want = [
        goodput(job, 1, 4),
        goodput(job, 2, 5),
        goodput(job, 2, 8),
        goodput(job, 2, 8),
        goodput(job, 4, 16),
    ]
    assert problem.goodputs(np.array(rows)[:, None])[:, 0] == pytest.approx(want)
    assert problem.spans(np.array(rows)[:, None], np.array([0]))[:, 0].tolist() == [1, 2, 2, 2, 4]
    assert problem.fair[0] == pytest.approx(goodput(job, 4, 16))
    two = cut(formulate(mixed([big_job("a"), big_job("b")], (4, "old"), (8, "new"))))
    assert two.fair == pytest.approx([goodput(job, 2, 6)] * 2)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_worth_what_the_best_numbered_virtual_nodes_are(seed: int) -> None:
    """As on a cluster whose nodes really are of two GPUs each, if one may choose among a node's."""
    rng = np.random.default_rng(seed)
    jobs = [big_job(f"job-{row}", noise_scale=float(10 ** rng.uniform(1, 4)), age_s=60.0) for row in range(2)]
    free = {"avoid_interference": False}
    real = cut(formulate(mixed(jobs, (2, "old"), (4, "new"), **free)))
    small = formulate(mixed(jobs, (2, "old"), (2, "new"), (2, "new"), **free))
    assert real.part is not None and small.part is None
    everything, numbered = all_matrices(real, 10**4), all_matrices(small, 10**4)
    assert everything is not None and numbered is not None
    best: dict[bytes, float] = {}
    for matrix, fitness in zip(numbered, small.rank(numbered)[1], strict=True):
        back = np.column_stack([matrix[:, 0], matrix[:, 1] + matrix[:, 2]]).tobytes()
        best[back] = max(best.get(back, 0.0), float(fitness))
    want = [best.pop(matrix.tobytes()) for matrix in everything]
    assert real.rank(everything)[1] == pytest.approx(want)
    assert not best


@pytest.mark.parametrize("exhaustive", [True, False], ids=["all matrices", "search"])
def test_the_search_goes_by_virtual_nodes(exhaustive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that synchronises badly between nodes gets no more of a larger one than a virtual node."""
    if not exhaustive:
        monkeypatch.setattr(policy, "_EXHAUSTIVE", 0)
    job = big_job(gpu_types=("new",), fits={"new": replace(SCALES_WELL, alpha_sync_node=5.0)})
    assert dict(decide(mixed([job], (4, "old"), (8, "new"))).jobs["job"].placement) == {"n1": 4}
    assert dict(decide(mixed([job], (8, "old"), (8, "new"))).jobs["job"].placement) == {"n1": 8}


def test_of_rows_that_count_alike_the_one_on_fewer_real_nodes_is_preferred() -> None:
    problem = cut(formulate(mixed([big_job()], (4, "new"), (8, "new"), (4, "old"))))
    split, whole = np.array([[4, 4, 0]]), np.array([[0, 8, 0]])
    assert problem.goodputs(np.stack([split, whole]))[:, 0] == pytest.approx([goodput(big_job(), 2, 8)] * 2)
    assert problem.rank(np.stack([split, whole]))[0].tolist() == [1, 0]
    assert problem.best_row(problem.present, np.zeros(2, dtype=np.int64), np.concatenate([split, whole])) == 1


def test_what_a_step_uphill_is_worth_is_what_it_adds_to_the_fitness() -> None:
    """The sum over jobs that fitness is the mean of grows by it; Pollux Eq. 14, p = -1."""
    jobs = [big_job("a"), big_job("b", noise_scale=1e4)]
    problem = cut(formulate(mixed(jobs, (4, "old"), (8, "new"), (8, "new"))))
    current = np.array([[0, 3, 0], [0, 0, 4]])
    state = climbing._State(problem, current)
    for job, node, more in [(0, 1, 1), (0, 1, 2), (0, 2, 4), (1, 2, 1), (1, 2, -1), (1, 1, 4)]:
        after = current.copy()
        after[job, node] += more
        before, then = problem.rank(current[None])[1][0], problem.rank(after[None])[1][0]
        gain = state.gain(np.array([job]), np.array([node]), np.array([more]))
        assert gain == pytest.approx(len(jobs) * (1 / before - 1 / then))


def test_two_jobs_that_span_do_not_meet_on_different_virtual_nodes_of_a_node() -> None:
    jobs = [big_job("a"), big_job("b")]
    problem = cut(formulate(mixed(jobs, (8, "new"), (4, "new"), (4, "new"), (4, "old"))))
    meet = np.array([[4, 4, 0, 0], [4, 0, 4, 0]])
    within = np.array([[5, 0, 0, 0], [3, 4, 0, 0]])
    assert problem.spans(within, np.arange(2)).tolist() == [2, 2]
    breeder = Breeder(problem, np.random.default_rng(0))
    priority = np.array([[2.0, 1.0]])
    want = [[4, 4, 0, 0], [0, 0, 4, 0]]
    assert problem.repair(meet[None], priority)[0].tolist() == want
    assert breeder.settle(meet[None].astype(np.float64), priority.copy())[0].tolist() == want
    assert problem.repair(within[None], priority)[0].tolist() == within.tolist()
    assert breeder.settle(within[None].astype(np.float64), priority.copy())[0].tolist() == within.tolist()


@pytest.mark.parametrize(
    ("row", "want"),
    [
        pytest.param([4, 4], [0, 4], id="a tie to the faster"),
        pytest.param([4, 8], [0, 8], id="two virtual nodes of the faster"),
        pytest.param([4, 3], [4, 0], id="most GPUs before speed"),
    ],
)
def test_a_row_over_two_types_goes_to_the_one_with_most_of_its_gpus(row: list[int], want: list[int]) -> None:
    problem = cut(formulate(mixed([big_job()], (4, "old"), (8, "new"))))
    assert problem.repair(np.array([[row]]), np.zeros((1, 1)))[0, 0].tolist() == want
    settled = Breeder(problem, np.random.default_rng(0)).settle(
        np.array([[row]], dtype=np.float64), np.zeros((1, 1))
    )
    assert settled[0, 0].tolist() == want


def test_the_figures_of_a_decision_are_those_of_the_real_nodes() -> None:
    rigid = big_job("rigid", kind="rigid", min_gpus=8, max_gpus=8, max_batch_size=64)
    (answer,) = decide(mixed([rigid], (4, "old"), (8, "new"))).jobs.values()
    assert answer.placement == {"n1": 8}
    fixed = BatchLimits(initial_batch_size=64, max_batch_size=64, max_local_batch_size=256)
    want = GoodputModel(SCALES_WELL, 1000.0, fixed, adaptive=False).best(1, 8).goodput
    assert answer.goodput == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize("shape", ["one_node", "several_nodes"])
def test_a_job_that_is_of_use_within_a_node_only_or_across_nodes_only_has_them_whole(shape: str) -> None:
    curve = GoodputCurve(**{shape: tuple(float(count) for count in range(1, 9))})
    told = {"estimator": "own", "estimates": {"new": curve}, "fits": {}, "gpu_types": ("new",)}
    job = big_job(kind="rigid", min_gpus=8, max_gpus=8, **told)
    nodes = [(4, "old"), (8, "new"), (8, "new")]
    problem = formulate(mixed([job], *nodes))
    rows = np.array([[[0, 8, 0]], [[0, 4, 4]]])
    assert np.array_equal(cut(problem).goodputs(rows), problem.goodputs(rows))
    (answer,) = decide(mixed([job], *nodes)).jobs.values()
    assert len(answer.placement) == (1 if shape == "one_node" else 2)


@st.composite
def unequal(draw: st.DrawFn) -> Snapshot:
    """A random snapshot to which nodes of other sizes, of a second type, have come."""
    snapshot = draw(snapshots(max_nodes=3, max_jobs=5))
    nodes = [replace(node, gpus=-(-node.gpus // 2) * 2) for node in snapshot.nodes]
    more = (Node(name="x0", gpus=2, gpu_type="gpu"), Node(name="x1", gpus=6, gpu_type="a100"))
    return replace(snapshot, nodes=(*nodes, *more))


@given(snapshot=unequal(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_the_same_matrices_are_legal_and_the_search_judges_them_as_the_ranking_does(
    snapshot: Snapshot, seed: int
) -> None:
    if not snapshot.jobs:
        return
    real, rng = formulate(snapshot), np.random.default_rng(seed)
    problem = cut(real)
    assert problem.part is not None
    wild = rng.integers(0, 7, size=(30, *problem.shape)) * (rng.random((30, *problem.shape)) < 0.5)
    priority = rng.random(wild.shape[:2])
    legal = problem.repair(wild, priority)
    assert np.array_equal(legal, real.repair(wild, priority))
    keys, _ = Breeder(problem, rng).judge(legal.astype(np.float64))
    assert np.array_equal(np.lexsort(keys), problem.rank(legal)[0])
    assert _row_as_whole(problem, legal[0], rng)
    top = climbing.climb(problem, legal[0], rng)
    assert np.array_equal(problem.repair(top[None], priority[:1])[0], top)
    assert problem.rank(np.stack([legal[0], top]))[0][0] == (0 if np.array_equal(legal[0], top) else 1)
    check(snapshot, decide(snapshot))


def _row_as_whole(problem: Problem, current: np.ndarray[Any, Any], rng: np.random.Generator) -> bool:
    jobs = rng.integers(len(current), size=6)
    wish = np.minimum(rng.integers(1, 9, size=6), problem.most[jobs])
    rows = problem.rows(current, jobs, wish, rng.integers(problem.num_types, size=6))
    whole = np.repeat(current[None], 6, axis=0)
    whole[np.arange(6), jobs] = rows
    order, _ = problem.rank(np.concatenate([current[None], whole]))
    return bool(problem.best_row(current, jobs, rows) == order[0] - 1)
