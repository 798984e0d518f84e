"""Goodput of many jobs at once against the model of each job, and the estimators of other workloads."""

from dataclasses import replace

import numpy as np
import pytest
from snapshot_builder import SCALES_BADLY, SCALES_WELL, make_job

from pollux.policy.models import job_models
from pollux.policy.tables import goodputs, models_of
from pollux.snapshot import Job
from pollux_agent.model.throughput import ThroughputParams, step_time

PLACEMENTS = np.array([(1, 1), (1, 2), (1, 3), (1, 8), (2, 8), (2, 16), (8, 64)])


def random_job(rng: np.random.Generator, index: int) -> Job:
    def params() -> ThroughputParams:
        return ThroughputParams(
            alpha_grad=rng.uniform(0, 0.2),
            beta_grad=10 ** rng.uniform(-4, -1.5),
            alpha_sync_local=10 ** rng.uniform(-3, 0),
            beta_sync_local=10 ** rng.uniform(-4, -1),
            alpha_sync_node=10 ** rng.uniform(-2, 0.5),
            beta_sync_node=10 ** rng.uniform(-4, -1),
            gamma=rng.uniform(1, 10),
        )

    initial = int(2 ** rng.uniform(5, 10))
    return make_job(
        f"job-{index}",
        kind=str(rng.choice(["adaptive", "strong_scaling"])),
        initial_batch_size=initial,
        max_batch_size=int(initial * 2 ** rng.uniform(0, 6)),
        max_local_batch_size=int(initial * 2 ** rng.uniform(-2, 1)),
        fits={"a": params(), "b": params()},
        noise_scale=float(initial * 10 ** rng.uniform(-1, 3)),
    )


def test_it_is_within_a_hundredth_of_the_best_split_of_each_job_and_never_above() -> None:
    rng = np.random.default_rng(3)
    jobs = [random_job(rng, index) for index in range(60)]
    row, kind, place = (axis.ravel() for axis in np.meshgrid(range(60), range(2), range(7), indexing="ij"))
    got = goodputs(models_of(jobs, ("a", "b")), row, kind, PLACEMENTS[place, 0], PLACEMENTS[place, 1])
    want = np.concatenate(
        [model.best(*PLACEMENTS.T).goodput for job in jobs for model in job_models(job, ("a", "b"))]
    )
    assert np.all((want > 0) == (got > 0))
    assert np.all(got <= want * (1 + 1e-9))
    assert np.min(got[want > 0] / want[want > 0]) > 0.99


def test_a_type_measured_on_one_gpu_only_scales_as_the_one_measured_on_several() -> None:
    slow = replace(SCALES_WELL, alpha_grad=0.03, beta_grad=0.006, alpha_sync_local=0.0, beta_sync_local=0.0)
    job = make_job(fits={"a": SCALES_BADLY, "b": slow}, gpus_seen={"a": 4, "b": 1})
    on_a, on_b = (model.params for model in job_models(job, ("a", "b")))
    assert on_a is not None and on_b is not None
    local = job.max_local_batch_size
    for nodes, gpus in ((1, 1), (1, 4), (2, 8)):
        ratio = step_time(on_b, nodes, gpus, local) / step_time(on_a, nodes, gpus, local)
        assert ratio == pytest.approx(3.0)  # Sia Eq. 1 with xput_B(1) / xput_A(1) = 1 / 3


def test_a_type_that_was_never_tried_counts_as_the_one_with_most_gpus_measured() -> None:
    job = make_job(fits={"a": SCALES_WELL, "b": SCALES_BADLY}, gpus_seen={"a": 1, "b": 8})
    assert job_models(job, ("c",))[0].params == SCALES_BADLY


def test_batch_inference_is_worth_its_throughput_and_timely_inference_one() -> None:
    offline = make_job("offline", estimator="throughput", noise_scale=None)
    timely = [
        make_job(str(limit), estimator="latency", noise_scale=None, latency_limit_s=limit)
        for limit in (1.0, 1e-3)
    ]
    one, two = np.array([1]), np.array([2])
    value = goodputs(models_of([offline], ("gpu",)), np.array([0]), np.array([0]), one, two)
    local, steps = np.meshgrid(np.arange(1, 257), np.arange(0, 32))
    batch = 2 * local * (steps + 1)
    speeds = np.where(
        batch <= offline.max_batch_size, batch / step_time(SCALES_WELL, 1, 2, local, steps), 0.0
    )
    assert value == pytest.approx(speeds.max(), rel=1e-3)
    rows, zeros = np.arange(2), np.zeros(2, dtype=np.int64)
    assert goodputs(models_of(timely, ("gpu",)), rows, zeros, zeros + 1, zeros + 1).tolist() == [1.0, 0.0]


def test_what_fits_in_memory_differs_by_type() -> None:
    fits = {"a": SCALES_WELL, "b": SCALES_WELL}
    job = make_job(fits=fits, noise_scale=1e6, max_local_batch_size_of={"a": 64, "b": 512})
    plain = replace(job, max_local_batch_size_of={})
    alike = [replace(plain, max_local_batch_size=most) for most in (64, 512)]
    first, second, two = np.array([0, 0]), np.array([0, 1]), np.array([2, 2])
    got = goodputs(models_of([job], ("a", "b")), first, second, two - 1, two)
    want = goodputs(models_of(alike, ("a",)), second, first, two - 1, two)
    assert got.tolist() == pytest.approx(want.tolist())
    assert got[0] < got[1]
    models = job_models(job, ("a", "b", "c"))
    assert [model.limits.max_local_batch_size for model in models] == [64, 512, 256]
