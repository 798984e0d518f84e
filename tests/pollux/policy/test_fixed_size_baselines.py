"""Gavel, Themis and Shockwave: what sets each of them apart, on jobs of a fixed size."""

from dataclasses import replace

import pytest
from snapshot_builder import SCALES_WELL, after_decision, make_job, make_snapshot

from pollux.policy import decide
from pollux.policy.requests import requests_of
from pollux.snapshot import Job, Node, PolicySettings, Snapshot

FASTER = replace(SCALES_WELL, alpha_grad=0.002, beta_grad=0.0004)


def rigid(name: str, gpus: int = 1, **change: object) -> Job:
    plain = {"kind": "rigid", "min_gpus": gpus, "max_gpus": gpus, "target_progress": 5000.0}
    return make_job(name, **(plain | change))


def running(snapshot: Snapshot, rounds: int) -> dict[str, list[int]]:
    """GPUs of each job in each of the next rounds."""
    held: dict[str, list[int]] = {job.job_id: [] for job in snapshot.jobs}
    for _ in range(rounds):
        decision = decide(snapshot)
        for job_id, answer in decision.jobs.items():
            held[job_id].append(sum(answer.placement.values()))
        snapshot = after_decision(snapshot, decision)
    return held


def under(name: str, jobs: list[Job], **nodes: int) -> Snapshot:
    return make_snapshot(jobs, nodes=nodes, policy=PolicySettings(name=name))


@pytest.mark.parametrize("name", ["gavel", "gavel-fairness"])
def test_gavel_gives_the_fast_type_to_the_job_that_gains_most_there(name: str) -> None:
    picky = rigid("picky", fits={"A": SCALES_WELL, "B": FASTER})
    easy = rigid("easy", fits={"A": SCALES_WELL, "B": SCALES_WELL})
    snapshot = replace(
        under(name, [easy, picky]),
        nodes=(Node(name="a", gpus=1, gpu_type="A"), Node(name="b", gpus=1, gpu_type="B")),
    )
    decision = decide(snapshot)
    assert decision.jobs["picky"].placement == {"b": 1}
    assert decision.jobs["easy"].placement == {"a": 1}


def test_gavel_shares_a_gpu_in_time_where_rounds_are_owed() -> None:
    held = running(under("gavel-fairness", [rigid("a"), rigid("b")], n0=1), 20)
    assert sum(held["a"]) + sum(held["b"]) == 20
    assert 7 <= sum(held["a"]) <= 13


def test_rho_is_the_time_to_finish_over_that_in_an_equal_share() -> None:
    waited = rigid("waited", age_s=7200.0, attained_gpu_s=0.0)
    served = rigid("served", age_s=7200.0, attained_gpu_s=7200.0)
    requests = requests_of(under("themis", [waited, served], n0=1))
    left = float(requests.remaining_s[0])
    assert requests.rho[0] == pytest.approx((7200 + left) / (2 * left))
    assert requests.rho[1] == pytest.approx((7200 + left) / (2 * (7200 + left)))


def test_themis_keeps_a_lease_and_then_hands_the_gpu_to_the_job_treated_worst() -> None:
    first = rigid("first", age_s=60.0)
    late = rigid("late", age_s=0.0)
    held = running(under("themis", [first, late], n0=1), 16)
    assert held["first"][:10] == [1] * 10  # ten rounds of a minute
    assert held["late"][10:] == [1] * 6


def test_shockwave_runs_the_job_treated_unfairly_first() -> None:
    waited = rigid("waited", age_s=36000.0, attained_gpu_s=0.0)
    served = rigid("served", age_s=36000.0, attained_gpu_s=36000.0)
    assert decide(under("shockwave", [served, waited], n0=1)).jobs["waited"].placement == {"n0": 1}


def test_shockwave_leaves_nothing_idle_that_a_job_could_use() -> None:
    jobs = [rigid("large", 4), rigid("small", 1), rigid("middle", 2)]
    held = running(under("shockwave", jobs, n0=4), 5)
    assert all(sum(gpus) >= 3 for gpus in zip(*held.values(), strict=True))
