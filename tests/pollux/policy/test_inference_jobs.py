"""Workloads that are no training, Sia section 3.4: batch inference, and inference with a promised latency."""

import pytest
from snapshot_builder import SCALES_WELL, make_job, make_snapshot

from pollux.policy import decide
from pollux.snapshot import Job, PolicySettings
from pollux_agent.model.throughput import step_time

BATCH = 256


def timely(limit_s: float, **change: object) -> Job:
    """Inference of 256 samples at a time, spread over the GPUs that it has."""
    return make_job(
        "timely",
        **{
            "estimator": "latency",
            "latency_limit_s": limit_s,
            "noise_scale": None,
            "initial_batch_size": BATCH,
            "max_batch_size": BATCH,
            "max_gpus_seen": 8,
        }
        | change,
    )


def gpus_of(policy: str, *jobs: Job) -> dict[str, int]:
    snapshot = make_snapshot(list(jobs), nodes={"n0": 4, "n1": 4}, policy=PolicySettings(name=policy))
    return {name: sum(job.placement.values()) for name, job in decide(snapshot).jobs.items()}


def least_gpus(limit_s: float) -> int:
    """By the throughput model: the fewest GPUs of one node on which a batch is done in time."""
    return next(gpus for gpus in (1, 2, 4) if step_time(SCALES_WELL, 1, gpus, BATCH // gpus) <= limit_s)


@pytest.mark.parametrize("policy", ["sia", "ours"])
@pytest.mark.parametrize("limit_s", [1.0, 0.3, 0.15])
def test_a_service_with_a_reservation_gets_the_fewest_gpus_that_keep_its_promise(
    policy: str, limit_s: float
) -> None:
    service = timely(limit_s, reserved_from_unix_s=0.0, reserved_until_unix_s=2e9)
    gpus = gpus_of(policy, service, make_job("train", max_gpus_seen=8))
    assert gpus["timely"] == least_gpus(limit_s)
    assert gpus["train"] >= 2


@pytest.mark.parametrize("policy", ["sia", "ours"])
def test_a_promise_that_no_number_of_gpus_keeps_takes_none(policy: str) -> None:
    assert gpus_of(policy, timely(1e-3), make_job("train", max_gpus_seen=8)) == {"timely": 0, "train": 8}


@pytest.mark.parametrize("policy", ["sia", "ours"])
def test_batch_inference_shares_with_a_training_by_what_each_makes_of_its_gpus(policy: str) -> None:
    offline = make_job("offline", estimator="throughput", noise_scale=None, max_gpus_seen=8)
    gpus = gpus_of(policy, offline, make_job("train", max_gpus_seen=8))
    assert gpus["offline"] == gpus["train"] == 4
    calm = make_job("train", max_gpus_seen=8, noise_scale=0.0, max_batch_size=64)
    gpus = gpus_of(policy, offline, calm)
    assert gpus["offline"] >= gpus["train"] >= 1
