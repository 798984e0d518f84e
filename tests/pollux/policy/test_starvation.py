"""No job that could run is left waiting, and all of them end, whatever adaptive policy decides."""

from dataclasses import replace

import numpy as np
import pytest
from snapshot_builder import SCALES_WELL, after_decision, make_snapshot, new_job

from pollux.plan import check
from pollux.policy import decide
from pollux.policy.models import job_models
from pollux.snapshot import Decision, Job, PolicySettings, Snapshot

ROUNDS = 10


def arrivals(rng: np.random.Generator) -> list[tuple[int, Job]]:
    """Eight jobs of different length and scaling, most of them at once."""
    jobs = []
    for index in range(8):
        fit = replace(
            SCALES_WELL,
            beta_grad=float(10 ** rng.uniform(-4, -2)),
            alpha_sync_local=float(10 ** rng.uniform(-4, 0)),
            alpha_sync_node=float(10 ** rng.uniform(-3, 0)),
        )
        job = new_job(
            f"job-{index}",
            max_gpus=8,
            fits={"gpu": fit},
            noise_scale=float(10 ** rng.uniform(1, 4)),
            target_progress=1.0,
        )
        speed = float(job_models(job, ("gpu",))[0].best(1, 1).goodput) / job.initial_batch_size
        steps = speed * float(rng.uniform(120.0, 3600.0))
        jobs.append((int(rng.integers(0, 5)), replace(job, target_progress=steps)))
    return jobs


def moved_on(snapshot: Snapshot, decision: Decision) -> Snapshot:
    """The next round: a job that kept its allocation got on as its model says."""
    later = after_decision(snapshot, decision)
    jobs = []
    for before, job in zip(snapshot.jobs, later.jobs, strict=True):
        if job.placement and job.placement == before.placement:
            model = job_models(job, ("gpu",))[0]
            goodput = float(model.best(len(job.placement), job.num_gpus).goodput)
            job = replace(job, progress=job.progress + 60.0 * goodput / job.initial_batch_size)
        if job.target_progress is None or job.progress < job.target_progress:
            jobs.append(job)
    return replace(later, jobs=tuple(jobs))


@pytest.mark.parametrize("name", ["pollux", "sia", "ours"])
@pytest.mark.parametrize("seed", range(3))
def test_every_job_holds_a_gpu_within_ten_rounds_of_asking_and_ends(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    coming = arrivals(rng)
    policy = PolicySettings(name=name, population=20, generations=20)
    snapshot = make_snapshot([], nodes={"n0": 4, "n1": 4}, policy=policy)
    waits: dict[str, int] = {}
    for number in range(400):
        new = tuple(job for round_, job in coming if round_ == number)
        snapshot = replace(snapshot, jobs=(*snapshot.jobs, *new))
        decision = decide(snapshot)
        check(snapshot, decision)
        for job_id, answer in decision.jobs.items():
            waits[job_id] = 0 if answer.placement else waits.get(job_id, 0) + 1
            assert waits[job_id] < ROUNDS
        snapshot = moved_on(snapshot, decision)
        if number > 5 and not snapshot.jobs:
            return
    pytest.fail(f"jobs that never end: {[job.job_id for job in snapshot.jobs]}")
