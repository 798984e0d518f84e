"""Many jobs at once, where the program is relaxed first: none is too equal, and no first claim is lost."""

import pytest
from snapshot_builder import make_job, new_job

from pollux.plan import check
from pollux.policy import decide
from pollux.snapshot import Job, Node, PolicySettings, Snapshot


def cluster(kinds: dict[str, int]) -> tuple[Node, ...]:
    """So many nodes of 8 GPUs of each type."""
    return tuple(
        Node(name=f"{kind}-{index}", gpus=8, gpu_type=kind)
        for kind, count in kinds.items()
        for index in range(count)
    )


def decided(jobs: list[Job], nodes: tuple[Node, ...], policy: str) -> list[int]:
    """GPUs of each job."""
    settings = PolicySettings(name=policy)
    snapshot = Snapshot(
        decision=7, now_unix_s=1e9, interval_s=60.0, nodes=nodes, jobs=tuple(jobs), policy=settings
    )
    decision = decide(snapshot)
    check(snapshot, decision)
    return [sum(decision.jobs[job.job_id].placement.values()) for job in jobs]


@pytest.mark.parametrize("policy", ["sia", "ours"])
@pytest.mark.parametrize(
    ("count", "kinds"), [(2_100, {"gpu": 16}), (700, {"gpu": 4, "a100": 4, "t4": 4}), (2_100, {"gpu": 1})]
)
@pytest.mark.parametrize("ages", [[0.0], [0.0, 600.0, 7200.0]], ids=["equal", "of several ages"])
def test_a_burst_of_equal_jobs_fills_the_cluster(
    policy: str, count: int, kinds: dict[str, int], ages: list[float]
) -> None:
    jobs = [new_job(f"job-{index}", age_s=ages[index % len(ages)]) for index in range(count)]
    nodes = cluster(kinds)
    assert sum(decided(jobs, nodes, policy)) == sum(node.gpus for node in nodes)


@pytest.mark.parametrize("policy", ["sia", "ours"])
def test_reservations_hold_beside_a_thousand_jobs(policy: str) -> None:
    """Each needs 48 GPUs of one type; three fit on a type, and the relaxation splits one over both."""
    fit = make_job().fits["gpu"]
    bounds = {"max_batch_size": 1024, "max_local_batch_size": 64, "initial_batch_size": 32}
    reserved = [
        make_job(
            f"reserved-{index}",
            min_gpus=48,
            max_gpus=64,
            max_gpus_seen=32,
            reserved_from_unix_s=0.0,
            fits={"a": fit, "b": fit},
            noise_scale=300.0,
            **(bounds | {"max_batch_size": 2048}),
        )
        for index in range(5)
    ]
    jobs = [new_job(f"job-{index}", **bounds) for index in range(1_100)]
    counts = decided([*jobs, *reserved], cluster({"a": 20, "b": 20}), policy)
    assert min(counts[len(jobs) :]) >= 48
    assert sum(counts) == 320
