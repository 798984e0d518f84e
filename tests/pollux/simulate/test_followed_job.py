"""Following one job through a simulation changes nothing and shows how it adapts."""

from dataclasses import replace

from simulation_builder import apps, settings, workload

from pollux.simulate.engine import Simulation
from pollux.simulate.follow import follow
from pollux.simulate.runner import Run
from pollux.simulate.setup import uniform
from pollux.simulate.synthetic import synthetic_traces

JOBS = workload((0, "resnet18", 4, 512), (600, "deepspeech2", 2, 80), (900, "bert", 1, 12))


def test_the_job_of_most_gpu_time_is_followed_and_the_outcome_is_the_same() -> None:
    run = Run(traces=synthetic_traces(), workload=JOBS, cluster=uniform(2, 4), settings=settings("pollux"))
    outcome, course = follow(run)
    alone = Simulation(JOBS, apps(), run.cluster, run.settings).run()
    assert [job.completed_s for job in outcome.jobs] == [job.completed_s for job in alone.jobs]
    longest = max(outcome.jobs, key=lambda job: job.attained_gpu_s)
    assert course.name == longest.request.name
    times = (course.time_s, course.gpus, course.batch_size, course.efficiency, course.active)
    assert len({len(values) for values in times}) == 1
    assert sorted(course.time_s) == list(course.time_s)
    held = [(gpus, batch) for gpus, batch in zip(course.gpus, course.batch_size, strict=True) if gpus]
    assert all(batch >= longest.app.initial_batch_size for _, batch in held)
    assert max(gpus for gpus, _ in held) > 1
    assert {1, 2} <= set(course.active)


def test_the_first_jobs_of_a_workload_are_those_submitted_first() -> None:
    late_first = replace(JOBS, requests=tuple(reversed(JOBS.requests)))
    assert [request.application for request in late_first.first(2).requests] == ["resnet18", "deepspeech2"]
    assert late_first.first(9).requests == JOBS.requests
