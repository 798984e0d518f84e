"""Finish-time fairness: the isolated time and the share by which it is taken."""

import pytest
from simulation_builder import run, workload

from pollux.simulate.fairness import Isolation, fairness
from pollux.simulate.setup import uniform


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_job_alone_on_its_cluster_is_neither_faster_nor_slower_than_in_isolation(gpus: int) -> None:
    cluster = uniform(1, gpus)
    outcome = run(workload((70.0, "bert", 1, 12)), "pollux", cluster)
    assert fairness(outcome.jobs, cluster) == {"bert-0": pytest.approx(1.0)}


def test_with_two_equal_jobs_each_has_half_of_the_cluster() -> None:
    cluster = uniform(1, 4)
    outcome = run(workload((0.0, "bert", 2, 12), (0.0, "bert", 2, 12)), "fifo", cluster)
    (alone,) = run(workload((0.0, "bert", 2, 12)), "pollux", uniform(1, 2)).jobs
    job = outcome.jobs[0]
    assert job.completed_s is not None and alone.completed_s is not None
    assert fairness(outcome.jobs, cluster)["bert-0"] == pytest.approx(job.completed_s / alone.completed_s)


def test_between_whole_gpus_time_is_linear_and_below_one_in_proportion() -> None:
    isolation = Isolation(uniform(2, 4))
    job = run(workload((0.0, "deepspeech2", 1, 20)), "fifo").jobs[0]
    one, two, three = (isolation.seconds(job, gpus) for gpus in (1, 2, 3))
    (alone,) = run(workload((0.0, "deepspeech2", 1, 20)), "pollux", uniform(1, 1)).jobs
    assert one == alone.completed_s
    assert isolation.seconds(job, 2.5) == pytest.approx((two + three) / 2)
    assert isolation.seconds(job, 0.25) == pytest.approx(4 * one)
    assert one > two > three
