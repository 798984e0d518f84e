"""The Sia policy: its configurations, its objective against brute force, and the kinds of jobs it serves."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from snapshot_builder import SCALES_BADLY, SCALES_WELL, after_decision, make_job, make_snapshot, new_job

from pollux.plan import check
from pollux.policy import assign, decide
from pollux.policy.models import job_models
from pollux.policy.options import options_of
from pollux.policy.sia import formulate
from pollux.snapshot import Decision, Job, Node, PolicySettings, Snapshot

SIA = PolicySettings(name="sia")
FASTER = replace(SCALES_WELL, alpha_grad=0.004, beta_grad=0.0008)


def snapshot_of(jobs: list[Job], nodes: dict[str, tuple[str, int]], **change: Any) -> Snapshot:
    given = tuple(Node(name=name, gpu_type=kind, gpus=gpus) for name, (kind, gpus) in nodes.items())
    return replace(make_snapshot(jobs, policy=SIA, **change), nodes=given)


def gpus_of(decision: Decision) -> dict[str, int]:
    return {name: sum(job.placement.values()) for name, job in decision.jobs.items()}


def offered(snapshot: Snapshot) -> set[tuple[str, int, int, str]]:
    options = options_of(snapshot)
    return {
        (snapshot.jobs[job].job_id, nodes, gpus, options.hardware.types[kind])
        for job, nodes, gpus, kind in zip(
            options.job.tolist(),
            options.nodes.tolist(),
            options.gpus.tolist(),
            options.kind.tolist(),
            strict=True,
        )
    }


def test_the_configurations_are_those_of_the_papers_example() -> None:
    job = make_job("j", fits={"A": SCALES_WELL, "B": FASTER}, max_gpus_seen=8)
    snapshot = snapshot_of([job], {"n0": ("A", 2), "n1": ("B", 4)})
    want = {(1, 1, "A"), (1, 2, "A"), (1, 1, "B"), (1, 2, "B"), (1, 4, "B")}
    assert offered(snapshot) == {("j", *shape) for shape in want}


def test_beyond_a_node_only_whole_nodes_are_offered() -> None:
    job = make_job("j", max_gpus=64, max_gpus_seen=64)
    shapes = {shape[1:3] for shape in offered(make_snapshot([job], nodes=dict.fromkeys("abc", 4)))}
    assert shapes == {(1, 1), (1, 2), (1, 4), (2, 8), (3, 12)}


def test_a_node_of_six_is_two_virtual_nodes_of_four_and_two() -> None:
    fixed = [make_job(name, kind="rigid", min_gpus=4, max_gpus=4) for name in "abc"]
    small = make_job("d", kind="rigid", min_gpus=2, max_gpus=2)
    snapshot = make_snapshot(
        [*fixed, small, replace(small, job_id="e")], nodes={"n0": 6, "n1": 6}, policy=SIA
    )
    counts = gpus_of(decide(snapshot))
    assert sorted(counts[name] for name in "abc") == [0, 4, 4]
    assert counts["d"] == counts["e"] == 2


def worth(snapshot: Snapshot, job: Job, p: float) -> dict[tuple[str, int] | None, float]:
    """A job's terms of Sia Eq. 4 written out, one for each (type, GPUs) on one node, and for none."""
    values = {(kind, gpus): value(job, kind, gpus) for kind, gpus in shapes(snapshot, job)}
    lowest = min(values.values())
    held = {
        node.gpu_type: sum(job.placement.values()) for node in snapshot.nodes if node.name in job.placement
    }
    delta = 30 if job.restart_s is None else job.restart_s
    factor = (job.age_s - job.restarts * delta) / (job.age_s + delta)
    terms: dict[tuple[str, int] | None, float] = {None: -1.1}
    for (kind, gpus), goodput in values.items():
        utility = job.min_gpus * goodput / lowest
        changes = bool(job.placement) and held != {kind: gpus}
        terms[kind, gpus] = np.sign(p) * (utility * (factor if changes else 1.0)) ** p
    return terms


def value(job: Job, kind: str, gpus: int) -> float:
    return float(job_models(job, (kind,))[0].best(1, gpus).goodput)


def shapes(snapshot: Snapshot, job: Job) -> list[tuple[str, int]]:
    return [
        (node.gpu_type, gpus)
        for node in snapshot.nodes
        for gpus in (1, 2, 4)
        if job.min_gpus <= gpus <= min(node.gpus, job.gpu_limit)
    ]


@pytest.mark.parametrize("p", [-0.5, -1.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_it_finds_the_optimum_that_trying_everything_finds(p: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs = [
        make_job(
            f"job-{index}",
            fits={
                "A": replace(SCALES_WELL, beta_grad=float(rng.uniform(0.001, 0.01))),
                "B": replace(SCALES_WELL, beta_grad=float(rng.uniform(0.0005, 0.01)), alpha_sync_local=0.1),
            },
            noise_scale=float(10 ** rng.uniform(1, 4)),
            max_gpus_seen=int(rng.integers(1, 3)),
            placement={"n0": 1} if index == 0 else {},
            restarts=int(rng.integers(0, 20)),
            age_s=1200.0,
        )
        for index in range(4)
    ]
    snapshot = snapshot_of(jobs, {"n0": ("A", 2), "n1": ("B", 4)})
    snapshot = replace(snapshot, policy=PolicySettings(name="sia", fairness_p=p))
    sizes = {node.gpu_type: node.gpus for node in snapshot.nodes}
    terms = [worth(snapshot, job, p) for job in jobs]
    best = max(
        sum(term[chosen] for term, chosen in zip(terms, choice, strict=True))
        for choice in product(*terms)
        if all(sum(c[1] for c in choice if c and c[0] == kind) <= size for kind, size in sizes.items())
    )
    decision = decide(snapshot)
    check(snapshot, decision)
    kind_of = {node.name: node.gpu_type for node in snapshot.nodes}
    got = 0.0
    for job, term in zip(jobs, terms, strict=True):
        where = decision.jobs[job.job_id].placement
        got += term[(kind_of[next(iter(where))], sum(where.values())) if where else None]
    assert got == pytest.approx(best, abs=2e-3 * abs(best))


def test_each_job_gets_the_type_where_it_gains_most() -> None:
    picky = make_job("picky", max_gpus=1, fits={"A": SCALES_WELL, "B": FASTER}, gpus_seen={"A": 1, "B": 1})
    easy = make_job("easy", max_gpus=1, fits={"A": SCALES_WELL, "B": SCALES_WELL})
    decision = decide(snapshot_of([easy, picky], {"n0": ("A", 1), "n1": ("B", 1)}))
    assert decision.jobs["picky"].placement == {"n1": 1}
    assert decision.jobs["easy"].placement == {"n0": 1}


def test_a_hybrid_parallel_job_scales_in_units_of_its_replica() -> None:
    job = make_job(
        "gpt", kind="hybrid_parallel", min_gpus=2, max_gpus=16, max_gpus_seen=16, gpus_per_replica=2,
        gpus_per_replica_of={"B": 8}, fits={"A": SCALES_WELL, "B": SCALES_WELL},
    )  # fmt: skip
    snapshot = snapshot_of([job], {"a0": ("A", 4), "a1": ("A", 4), "b0": ("B", 8), "b1": ("B", 8)})
    assert {(gpus, kind) for _, _, gpus, kind in offered(snapshot)} == {
        (2, "A"), (4, "A"), (8, "A"), (8, "B"), (16, "B"),
    }  # fmt: skip


def test_a_reservation_gets_its_gpus_when_it_begins_and_keeps_them() -> None:
    busy = [make_job(f"busy-{index}", placement={"n0": 1}, max_gpus=1) for index in range(4)]
    booked = new_job(
        "booked", min_gpus=2, max_gpus=2, reserved_from_unix_s=1e9, reserved_until_unix_s=1e9 + 600
    )
    snapshot = make_snapshot([*busy, booked], nodes={"n0": 4}, policy=SIA)
    decision = decide(snapshot)
    assert decision.jobs["booked"].placement == {"n0": 2}
    again = decide(after_decision(snapshot, decision))
    assert again.jobs["booked"].placement == {"n0": 2}


def test_a_small_gain_is_not_worth_a_restart() -> None:
    slightly = replace(SCALES_WELL, beta_grad=SCALES_WELL.beta_grad * 0.98)
    job = make_job(placement={"n0": 1}, max_gpus=1, restarts=5, fits={"A": SCALES_WELL, "B": slightly})
    snapshot = snapshot_of([job], {"n0": ("A", 1), "n1": ("B", 1)})
    assert decide(snapshot).jobs["job"].placement == {"n0": 1}
    careless = replace(snapshot, policy=PolicySettings(name="sia", restart_discount=False))
    assert decide(careless).jobs["job"].placement == {"n1": 1}


def test_a_job_that_scales_badly_leaves_gpus_to_others() -> None:
    jobs = [make_job("good", max_gpus_seen=2), make_job("bad", fits={"gpu": SCALES_BADLY}, max_gpus_seen=2)]
    counts = gpus_of(decide(make_snapshot(jobs, nodes={"n0": 4, "n1": 2}, policy=SIA)))
    assert counts["good"] == 4
    assert counts["bad"] == 1


def test_rows_bound_what_options_take_together() -> None:
    jobs = [make_job(f"j{index}", max_gpus=64, max_gpus_seen=64) for index in range(3)]
    options = formulate(make_snapshot(jobs, nodes={"a": 4, "b": 4, "c": 6}, policy=SIA)).options
    assert sorted(options.limit.tolist()) == [1, 2, 12, 14]  # nodes of six and four; GPUs in fours, and all


@pytest.mark.parametrize("policy", ["sia", "ours"])
def test_a_job_that_is_restarting_is_left_alone_until_it_trains(policy: str) -> None:
    job = make_job(placement={"n0": 1}, max_gpus_seen=4)
    snapshot = make_snapshot([job], nodes={"n0": 4}, policy=PolicySettings(name=policy))
    assert gpus_of(decide(snapshot)) == {"job": 4}
    restarting = decide(replace(snapshot, jobs=(replace(job, restarting=True),))).jobs["job"]
    assert restarting.placement == {"n0": 1}
    assert "restarting" in restarting.reason


@pytest.mark.parametrize("policy", ["sia", "ours"])
@pytest.mark.parametrize("whole_program", [2_000, 5])
def test_a_solver_that_finds_nothing_in_time_takes_nobody_s_gpus(
    policy: str, whole_program: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [make_job(f"r{index}", placement={f"n{index % 4}": 1}) for index in range(12)]
    waiting = [new_job(f"w{index}") for index in range(8)]
    nodes = dict.fromkeys(("n0", "n1", "n2", "n3"), 4)
    snapshot = make_snapshot([*waiting, *running], nodes=nodes, policy=PolicySettings(name=policy))
    assert "timed_out" not in decide(snapshot).state
    monkeypatch.setattr(assign, "_SAFETY_S", 0.0)
    monkeypatch.setattr(assign, "_WHOLE_PROGRAM", whole_program)
    decision = decide(snapshot)
    check(snapshot, decision)
    assert decision.state["timed_out"] is True
    for job in running:
        assert decision.jobs[job.job_id].placement == job.placement


def test_a_quota_that_fell_holds_even_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "_SAFETY_S", 0.0)
    jobs = [make_job(f"j{index}", team="red", placement={"node-0": 1}) for index in range(2)]
    decision = decide(make_snapshot(jobs, policy=SIA, quotas={"red": 1}))
    assert sorted(gpus_of(decision).values()) == [0, 1]
