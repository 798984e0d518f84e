"""What the Pollux policy decides: the optimum of the paper's fitness, without thrash, with reasons."""

from dataclasses import replace
from itertools import pairwise, product
from math import ceil

import numpy as np
import pytest
from snapshot_builder import SCALES_BADLY, SCALES_WELL, after_decision, make_job, make_snapshot, new_job

from pollux.errors import DecisionError
from pollux.plan import check
from pollux.policy import decide
from pollux.policy import pollux as policy
from pollux.policy.problem import Problem, formulate
from pollux.snapshot import Decision, Job, JobDecision, Node, PolicySettings, Snapshot
from pollux_agent.model.goodput import BatchLimits, GoodputModel
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol import encode


def gpus_of(decision: Decision) -> dict[str, int]:
    return {name: sum(job.placement.values()) for name, job in decision.jobs.items()}


def goodput(job: Job, placement: dict[str, int]) -> float:
    """Best goodput on a placement, straight from the model."""
    limits = BatchLimits(
        initial_batch_size=job.initial_batch_size,
        max_batch_size=job.max_batch_size,
        max_local_batch_size=job.max_local_batch_size,
    )
    if not placement:
        return 0.0
    model = GoodputModel(job.fits["gpu"], job.noise_scale, limits)
    return float(model.best(len(placement), sum(placement.values())).goodput)


def fitness(snapshot: Snapshot, placements: tuple[dict[str, int], ...]) -> float:
    """FITNESS_p of Pollux Eq. 14 with Eq. 15 and 16, written out for one allocation."""
    total, width = sum(node.gpus for node in snapshot.nodes), max(node.gpus for node in snapshot.nodes)
    share = ceil(total / len(snapshot.jobs))
    names = [node.name for node in snapshot.nodes]
    fair = {name: share // ceil(share / width) for name in names[: ceil(share / width)]}
    fair[names[0]] += share - sum(fair.values())
    values = []
    for job, placement in zip(snapshot.jobs, placements, strict=True):
        delta = 30.0 if job.restart_s is None else job.restart_s
        factor = max((job.age_s - job.restarts * delta) / (job.age_s + delta), 0.0)
        speedup = goodput(job, placement) / goodput(job, fair)
        values.append((speedup if placement == dict(job.placement) else factor * speedup) + 1e-3)
    p = -1.0 if snapshot.policy.fairness_p is None else snapshot.policy.fairness_p
    return float(np.mean(np.array(values) ** p) ** (1 / p))


def brute_force(snapshot: Snapshot) -> float:
    """The highest fitness of all allocations that keep the rules."""
    names = [node.name for node in snapshot.nodes]
    rows = [
        {name: gpus for name, gpus in zip(names, row, strict=True) if gpus}
        for row in product(*(range(node.gpus + 1) for node in snapshot.nodes))
    ]
    best = 0.0
    for placements in product(rows, repeat=len(snapshot.jobs)):
        answers = {
            job.job_id: JobDecision(placement=placement, reason="")
            for job, placement in zip(snapshot.jobs, placements, strict=True)
        }
        candidate = Decision(decision=snapshot.decision, policy="all", objective=0.0, jobs=answers)
        try:
            check(snapshot, candidate)
        except DecisionError:
            continue
        best = max(best, fitness(snapshot, placements))
    return best


def random_snapshot(seed: int, *, num_jobs: int, p: float) -> Snapshot:
    """Jobs of different speeds on two nodes of two GPUs, some of them running."""
    rng = np.random.default_rng(seed)
    held = [{"node-0": 1}, {"node-1": 2}, {"node-0": 1}, {}, {}]
    jobs = []
    for index in range(num_jobs):
        times = 10 ** rng.uniform([-2, -4, -3, -5, -2, -5], [-1, -2, -1, -3, 0, -3])
        params = ThroughputParams(
            **dict(zip(list(ThroughputParams.__dataclass_fields__)[:6], times.tolist(), strict=True)),
            gamma=float(rng.uniform(1, 4)),
        )
        jobs.append(
            make_job(
                f"job-{index}",
                fits={"gpu": params},
                noise_scale=float(10 ** rng.uniform(1, 4)),
                placement=held[index] if rng.random() < 0.7 else {},
                age_s=float(rng.uniform(0, 2000)),
                restarts=int(rng.integers(0, 5)),
                restart_s=[None, 5.0, 60.0][rng.integers(3)],
                max_gpus_seen=2,
            )
        )
    return make_snapshot(jobs, policy=PolicySettings(name="pollux", fairness_p=p, seed=seed))


@pytest.mark.parametrize("exhaustive", [True, False], ids=["all matrices", "search"])
@pytest.mark.parametrize(
    ("seed", "num_jobs", "p"), [(0, 1, -1), (1, 2, -1), (2, 3, -1), (3, 3, 1), (4, 3, -4), (5, 2, 0.5)]
)
def test_on_a_tiny_cluster_it_finds_the_optimum(
    seed: int, num_jobs: int, p: float, exhaustive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exhaustive:
        monkeypatch.setattr(policy, "_EXHAUSTIVE", 0)
    snapshot = random_snapshot(seed, num_jobs=num_jobs, p=p)
    decision = decide(snapshot)
    assert decision.objective == pytest.approx(brute_force(snapshot), rel=1e-6)
    placements = tuple(dict(decision.jobs[job.job_id].placement) for job in snapshot.jobs)
    assert decision.objective == pytest.approx(fitness(snapshot, placements), rel=1e-6)


def test_a_mean_with_p_zero_is_geometric() -> None:
    snapshot = random_snapshot(2, num_jobs=3, p=1e-4)
    near = decide(snapshot).objective
    zero = decide(replace(snapshot, policy=replace(snapshot.policy, fairness_p=0.0))).objective
    assert zero == pytest.approx(near, rel=1e-3)


def test_a_new_job_gets_a_free_gpu_in_its_first_cycle() -> None:
    decision = decide(make_snapshot([new_job("a")]))
    assert gpus_of(decision) == {"a": 1}
    assert decision.jobs["a"].reason.startswith("started on 1 GPU")
    assert "not fitted yet" in decision.jobs["a"].reason


def test_a_job_that_restarted_often_still_gets_a_free_gpu() -> None:
    unlucky = make_job("a", age_s=100.0, restarts=50)
    assert gpus_of(decide(make_snapshot([unlucky])))["a"] >= 1


def test_new_jobs_share_what_is_free_and_running_ones_are_left_alone() -> None:
    jobs = [make_job("old", placement={"node-0": 2}), new_job("b"), new_job("c")]
    assert gpus_of(decide(make_snapshot(jobs))) == {"old": 2, "b": 1, "c": 1}


def test_a_job_is_shrunk_for_another_one_that_waits() -> None:
    jobs = [
        make_job("old", name="Old", placement={"node-0": 2, "node-1": 2}),
        new_job("young", name="Young", age_s=60.0),
    ]
    decision = decide(make_snapshot(jobs))
    assert gpus_of(decision)["young"] == 1
    assert 2 <= gpus_of(decision)["old"] <= 3
    assert "shrunk 4 -> " in decision.jobs["old"].reason
    assert "makes room for Young" in decision.jobs["old"].reason


def test_growth_doubles_from_cycle_to_cycle() -> None:
    snapshot = make_snapshot([new_job("a", max_gpus=8, restart_s=1.0)], nodes={"node-0": 4, "node-1": 4})
    counts = []
    for _ in range(6):
        decision = decide(snapshot)
        counts.append(gpus_of(decision)["a"])
        snapshot = after_decision(snapshot, decision)
    assert counts == [1, 2, 4, 8, 8, 8]


def test_the_last_gpu_goes_to_the_job_that_uses_it_best() -> None:
    jobs = [
        make_job("bad", fits={"gpu": SCALES_BADLY}, placement={"node-0": 1}),
        make_job("good", placement={"node-1": 1}),
    ]
    snapshot = make_snapshot(jobs, nodes={"node-0": 1, "node-1": 2})
    assert gpus_of(decide(snapshot)) == {"bad": 1, "good": 2}


@pytest.mark.parametrize("exhaustive", [True, False], ids=["all matrices", "search"])
def test_two_equal_jobs_on_three_gpus_settle(exhaustive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exhaustive:
        monkeypatch.setattr(policy, "_EXHAUSTIVE", 0)
    snapshot = make_snapshot(
        [new_job("a", max_gpus=3), new_job("b", max_gpus=3)],
        nodes={"node-0": 3},
        policy=PolicySettings(name="pollux", population=20, generations=20),
    )
    history = []
    for cycle in range(60):
        decision = decide(snapshot)
        history.append({name: dict(job.placement) for name, job in decision.jobs.items()})
        snapshot = after_decision(snapshot, decision)
        if cycle == 0:
            fitted = {"fits": {"gpu": SCALES_WELL}, "noise_scale": 1000.0}
            snapshot = replace(snapshot, jobs=tuple(replace(job, **fitted) for job in snapshot.jobs))
    changes = [before != after for before, after in pairwise(history[5:])]
    assert sum(changes) <= 1
    assert sorted(len(placement) and placement["node-0"] for placement in history[-1].values()) == [1, 2]


@pytest.mark.parametrize("exhaustive", [True, False], ids=["all matrices", "search"])
def test_a_job_with_the_same_counts_keeps_its_nodes(
    exhaustive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exhaustive:
        monkeypatch.setattr(policy, "_EXHAUSTIVE", 0)
    nodes = {f"node-{index}": 2 for index in range(4)}
    jobs = [
        make_job(f"job-{index}", max_gpus=2, placement={f"node-{3 - index}": 2}, restarts=0)
        for index in range(4)
    ]
    decision = decide(make_snapshot(jobs, nodes=nodes, policy=PolicySettings(name="pollux", generations=20)))
    for job in jobs:
        assert decision.jobs[job.job_id].placement == job.placement
        assert decision.jobs[job.job_id].reason.startswith("keeps 2 GPUs")


def test_a_pinned_job_keeps_what_it_holds() -> None:
    pinned = make_job("pinned", placement={"node-0": 2, "node-1": 1}, preemptible=False)
    decision = decide(make_snapshot([pinned, *(make_job(f"job-{index}") for index in range(3))]))
    assert decision.jobs["pinned"].placement == pinned.placement
    assert "may not be preempted" in decision.jobs["pinned"].reason
    assert sum(gpus_of(decision).values()) == 4


def test_a_rigid_job_gets_all_of_its_gpus_or_none() -> None:
    rigid = make_job("rigid", kind="rigid", min_gpus=3, max_gpus=3)
    decision = decide(make_snapshot([rigid, make_job("a", placement={"node-0": 1})]))
    assert gpus_of(decision) == {"rigid": 3, "a": 1}
    too_large = replace(rigid, min_gpus=5, max_gpus=5)
    decision = decide(make_snapshot([too_large]))
    assert (
        decision.jobs["rigid"].reason == "waits: it needs 5 GPUs of one type at once, and there are 4 at most"
    )


def test_a_job_whose_node_is_gone_gets_other_gpus() -> None:
    jobs = [make_job("a", placement={"lost": 2}), make_job("b", placement={"node-0": 1})]
    decision = decide(make_snapshot(jobs))
    assert gpus_of(decision)["a"] >= 1
    assert "no longer there" in decision.jobs["a"].reason


def test_a_job_with_a_large_batch_limit_is_worth_more_gpus_once_its_gradients_are_noisy() -> None:
    quiet, noisy = make_job("quiet", noise_scale=1.0), make_job("noisy", noise_scale=1e5)
    counts = gpus_of(
        decide(make_snapshot([quiet, noisy], policy=PolicySettings(name="pollux", fairness_p=1.0)))
    )
    assert counts["noisy"] > counts["quiet"]


def test_reasons_carry_remarks_and_numbers() -> None:
    strange = make_job("a", fits={}, remarks=("its fit was refused: gamma is 99",), placement={"node-0": 1})
    reason = decide(make_snapshot([strange])).jobs["a"].reason
    assert "grown 1 -> 4" in reason
    assert "speed-up against the fair share (4 GPUs) 0.25 -> 1.00" in reason
    assert "its fit was refused: gamma is 99" in reason


def test_the_last_population_is_remembered_across_jobs_and_nodes_that_come_and_go() -> None:
    nodes = {f"node-{index}": 4 for index in range(6)}
    settings = PolicySettings(name="pollux", population=30, generations=5)
    jobs = [make_job(f"job-{index}") for index in range(8)]
    first = decide(make_snapshot(jobs, nodes=nodes, policy=settings))
    remembered = first.state["population"]
    assert remembered
    snapshot = make_snapshot(
        [*jobs[2:], new_job("fresh")],
        nodes={name: gpus for name, gpus in nodes.items() if name != "node-5"} | {"node-9": 4},
        policy=settings,
        state=first.state,
    )
    matrices = policy._recall(snapshot)
    assert len(matrices) == len(remembered)
    best = {name: dict(job.placement) for name, job in first.jobs.items()}
    for row, job in enumerate(snapshot.jobs):
        for column, node in enumerate(snapshot.nodes):
            assert matrices[0][row, column] == best.get(job.job_id, {}).get(node.name, 0)


def test_a_good_remembered_population_is_not_lost() -> None:
    """With no generation to search in, the answer is at least as good as what was remembered."""
    nodes = {f"node-{index}": 4 for index in range(4)}
    jobs = [make_job(f"job-{index}", noise_scale=10.0 ** (index % 4 + 1)) for index in range(7)]
    long = decide(make_snapshot(jobs, nodes=nodes, policy=PolicySettings(name="pollux", generations=60)))
    short = PolicySettings(name="pollux", generations=1)
    again = decide(make_snapshot(jobs, nodes=nodes, policy=short, state=long.state))
    assert again.objective >= long.objective * (1 - 1e-9)


@pytest.mark.parametrize("num_jobs", [3, 8], ids=["all tried", "searched"])
def test_the_last_bits_of_a_processor_change_no_byte_of_a_decision(
    num_jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vector instructions differ from machine to machine in the sixteenth digit, and a replay must not."""
    jobs = [make_job(f"job-{index}", noise_scale=10.0 ** (index % 4 + 1)) for index in range(num_jobs)]
    snapshot = make_snapshot(jobs, nodes={f"node-{index}": 3 for index in range(num_jobs // 2)})
    here = encode(decide(snapshot))

    def elsewhere(snapshot: Snapshot) -> Problem:
        problem = formulate(snapshot)
        bits = np.random.default_rng(1).choice([-2e-16, 0.0, 2e-16], size=problem.goodput.shape)
        return replace(problem, goodput=problem.goodput * (1.0 + bits))

    monkeypatch.setattr(policy, "formulate", elsewhere)
    assert encode(decide(snapshot)) == here


@pytest.mark.slow
def test_thirty_jobs_on_64_gpus_take_about_a_second() -> None:
    from time import process_time

    rng = np.random.default_rng(0)
    jobs = [
        make_job(
            f"job-{index}",
            noise_scale=float(10 ** rng.uniform(1, 4)),
            age_s=float(rng.uniform(0, 5000)),
            max_gpus=64,
            max_gpus_seen=int(rng.integers(1, 8)),
        )
        for index in range(30)
    ]
    snapshot = make_snapshot(jobs, nodes={f"node-{index}": 4 for index in range(16)})
    decide(snapshot)
    start = process_time()
    decision = decide(snapshot)
    assert process_time() - start < 3.0
    assert sum(gpus_of(decision).values()) > 50
    check(snapshot, decision)


def test_a_row_over_two_types_goes_to_the_one_with_more_of_its_gpus_and_a_tie_to_the_faster() -> None:
    slow = replace(SCALES_WELL, alpha_grad=0.05, beta_grad=0.01)
    job = make_job(max_gpus=8, max_gpus_seen=8, fits={"a-slow": slow, "b-fast": SCALES_WELL})
    nodes = (
        Node(name="n0", gpus=4, gpu_type="a-slow"),
        Node(name="n1", gpus=4, gpu_type="b-fast"),
    )
    problem = formulate(replace(make_snapshot([job]), nodes=nodes))
    tie, more = np.array([[[2, 2]], [[3, 2]]])
    repaired = problem.repair(np.stack([tie, more]), np.zeros((2, 1)))
    assert repaired.tolist() == [[[0, 2]], [[3, 0]]]
