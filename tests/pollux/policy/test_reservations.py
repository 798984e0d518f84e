"""First claims: a reservation gets its least GPUs, whoever else would gain more by them."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.random import Generator
from snapshot_builder import make_job, make_snapshot

from pollux.plan import check
from pollux.policy import decide
from pollux.snapshot import Job, Node, PolicySettings, Snapshot

NOW_S = 1e9
RESERVED = {"reserved_from_unix_s": NOW_S - 60, "reserved_until_unix_s": NOW_S + 600}


@pytest.mark.parametrize("policy", ["sia", "ours"])
def test_a_reservation_goes_before_a_larger_job_that_fits_only_in_its_place(policy: str) -> None:
    """Counts that are no powers of two: 5 and 6 GPUs take 11 of 14, and only one of them fits on the 8."""
    jobs = [
        make_job("reserved", kind="rigid", min_gpus=5, max_gpus=5, **RESERVED),
        make_job("larger", kind="rigid", min_gpus=6, max_gpus=6),
    ]
    settings = PolicySettings(name=policy)
    decision = decide(make_snapshot(jobs, nodes={"n0": 8, "n1": 4, "n2": 2}, policy=settings))
    assert decision.jobs["reserved"].placement == {"n0": 5}
    assert not decision.jobs["larger"].placement


def random_snapshot(rng: Generator) -> Snapshot:
    """Nodes of any size of two types; jobs of any size, some running, pinned, or reserved."""
    nodes = tuple(
        Node(name=f"n{index}", gpus=int(rng.integers(1, 9)), gpu_type=str(rng.choice(["gpu", "a100"])))
        for index in range(rng.integers(1, 6))
    )
    free, jobs = {node.name: node.gpus for node in nodes}, []
    for index in range(rng.integers(2, 9)):
        least = int(rng.choice([1, 1, 2, 3, 5, 6, 7]))
        most = least + int(rng.integers(0, 9))
        name = str(rng.choice(list(free)))
        held = min(int(rng.integers(0, 9)), free[name], most)
        free[name] -= held
        jobs.append(
            make_job(
                f"job-{index}",
                min_gpus=least,
                max_gpus=most,
                placement={name: held} if held else {},
                preemptible=bool(rng.random() < 0.85),
                **(RESERVED if rng.random() < 0.4 else {}),
            )
        )
    return replace(make_snapshot(jobs), nodes=nodes)


def first_claim(snapshot: Snapshot) -> Job | None:
    """The earliest reservation that one node has room for, if those that may not be preempted stay."""
    free = {node.name: node.gpus for node in snapshot.nodes}
    stays = [
        job
        for job in snapshot.jobs
        if not job.preemptible or (job.reserved_from_unix_s and job.num_gpus >= job.min_gpus)
    ]
    for job in stays:
        for name, gpus in job.placement.items():
            free[name] -= gpus
    asking = (
        job for job in snapshot.jobs if job.reserved_from_unix_s and not (job in stays and job.placement)
    )
    return next((job for job in asking if job.min_gpus <= max(free.values())), None)


@pytest.mark.parametrize("policy", ["sia", "ours"])
def test_the_first_of_the_reservations_that_have_room_holds_gpus(policy: str) -> None:
    rng, claims = np.random.default_rng(4), 0
    for _ in range(80):
        snapshot = replace(random_snapshot(rng), policy=PolicySettings(name=policy))
        decision = decide(snapshot)
        check(snapshot, decision)
        if (job := first_claim(snapshot)) is not None:
            claims += 1
            assert sum(decision.jobs[job.job_id].placement.values()) >= job.min_gpus
    assert claims > 30
