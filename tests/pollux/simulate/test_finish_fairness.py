"""Finish-time fairness: the isolated time and the share by which it is taken."""

import pytest
from simulation_builder import apps, run, workload

from pollux.simulate.fairness import Isolation, best_seconds, fairness
from pollux.simulate.setup import uniform


def test_a_job_alone_on_a_cluster_of_one_gpu_is_as_fast_as_it_can_be() -> None:
    cluster = uniform(1, 1)
    outcome = run(workload((0.0, "bert", 1, 12)), "pollux", cluster)
    (rho,) = fairness(outcome.jobs, cluster).values()
    assert 1.0 <= rho < 1.1


def test_with_two_equal_jobs_each_has_half_of_the_cluster() -> None:
    cluster = uniform(1, 4)
    outcome = run(workload((0.0, "bert", 2, 12), (0.0, "bert", 2, 12)), "fifo", cluster)
    job = outcome.jobs[0]
    assert job.completed_s is not None
    one, two = (best_seconds(apps()["bert"], "gpu", (gpus,)) for gpus in (1, 2))
    share_done = 30.0 / one[0]  # of the first epoch, on one GPU, before it has two
    alone_s = 60.0 + 30.0 + (1 - share_done) * two[0] + two[1]
    assert fairness(outcome.jobs, cluster)["bert-0"] == pytest.approx(job.completed_s / alone_s)


def test_between_whole_gpus_time_is_linear_and_below_one_in_proportion() -> None:
    isolation = Isolation(uniform(2, 4))
    job = run(workload((0.0, "deepspeech2", 1, 20)), "fifo").jobs[0]
    one, two, three = (isolation.seconds(job, gpus) for gpus in (1, 2, 3))
    assert one == pytest.approx(30.0 + best_seconds(job.app, "gpu", (1,)).sum())
    assert isolation.seconds(job, 2.5) == pytest.approx((two + three) / 2)
    assert isolation.seconds(job, 0.25) == pytest.approx(4 * one)
    assert one > two > three
