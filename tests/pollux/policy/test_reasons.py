"""What a decision says of each job is what it does."""

import random
import re

import pytest
from snapshot_builder import make_job, make_snapshot, new_job

from pollux.policy import decide
from pollux.policy.whatif import explain_job
from pollux.snapshot import Job, PolicySettings, Snapshot

ADAPTIVE = ("pollux", "sia", "ours")


def crowded(policy: str, seed: int) -> Snapshot:
    """Jobs that hold all of three nodes, of which some can use more than others, and new ones."""
    draw = random.Random(seed)
    jobs: list[Job] = []
    for node in ("n0", "n1", "n2"):
        for number, gpus in enumerate(draw.choice([(4,), (2, 2), (2, 1, 1), (3, 1)])):
            scale = draw.choice([1.0, 100.0, 1e4])
            jobs.append(make_job(f"{node}-{number}", placement={node: gpus}, noise_scale=scale, age_s=9e3))
    jobs += [new_job(f"new-{number}", age_s=600.0) for number in range(draw.randint(1, 4))]
    settings = PolicySettings(name=policy)
    return make_snapshot(jobs, nodes=dict.fromkeys(("n0", "n1", "n2"), 4), policy=settings)


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_a_job_makes_room_for_those_that_grow_where_it_gives_up_gpus(policy: str) -> None:
    said = 0
    for seed in range(12):
        snapshot = crowded(policy, seed)
        decision = decide(snapshot)
        before = {job.job_id: job.placement for job in snapshot.jobs}
        for job_id, answer in decision.jobs.items():
            found = re.search(r"makes room for ([^;]+?)(?: and (\d+) more)?(?:;|$)", answer.reason)
            if found is None:
                continue
            left = {node for node, gpus in before[job_id].items() if answer.placement.get(node, 0) < gpus}
            heirs = {
                heir
                for heir, other in decision.jobs.items()
                if sum(other.placement.values()) > sum(before[heir].values())
                and any(other.placement.get(node, 0) > before[heir].get(node, 0) for node in left)
            }
            names = set(found[1].split(", "))
            assert names <= heirs, (seed, job_id, answer.reason)
            assert len(names) + int(found[2] or 0) == len(heirs)
            said += 1
    assert said, "no job gave room to another one"


@pytest.mark.parametrize("policy", ["sia", "ours"])
def test_the_fair_share_that_is_named_is_the_one_that_a_speed_up_is_against(policy: str) -> None:
    """Five GPUs a job, of which a configuration inside a node takes four."""
    job = make_job("a", placement={"node-0": 4}, max_gpus=4)
    other = make_job("b", placement={"node-1": 4}, max_gpus=4)
    nodes = {"node-0": 5, "node-1": 5}
    decision = decide(make_snapshot([job, other], nodes=nodes, policy=PolicySettings(name=policy)))
    assert "speed-up against the fair share (4 GPUs) 1.00" in decision.jobs["a"].reason


@pytest.mark.parametrize("policy", ["sia", "ours"])
def test_a_job_with_times_but_no_noise_counts_as_training_at_m0(policy: str) -> None:
    job = make_job("a", noise_scale=None, placement={"node-0": 1})
    snapshot = make_snapshot([job], policy=PolicySettings(name=policy))
    decision = decide(snapshot)
    assert "its noise scale is not known yet, so it counts as training at its initial" in (
        decision.jobs["a"].reason
    )
    assert "not fitted" not in decision.jobs["a"].reason
    explanation = explain_job(snapshot, decision, "a")
    assert explanation.fitted, "its goodput is in samples a second"
    (now,) = [each for each in explanation.alternatives if each.now]
    step_s = next(iter(job.fits.values()))
    assert now.goodput == pytest.approx(
        job.initial_batch_size / (step_s.alpha_grad + step_s.beta_grad * job.initial_batch_size)
    )
