"""What ``pollux status`` says of a job before its first cycle, and of one that a cycle leaves waiting."""

from cycle_builder import World

from pollux.cli.status import look


def test_a_job_says_that_no_cycle_has_run_and_then_what_the_last_one_decided(world: World) -> None:
    def said(job_id: str) -> dict[str, object]:
        jobs = look(world.cluster, None, world.records)["jobs"]
        return next(job for job in jobs if job["job_id"] == job_id)

    world.submit(*(f"job-{number}" for number in range(6)), max_gpus=1)
    for number in range(6):
        world.cluster.set_run(f"job-{number}", f"run-{number}")
    assert "none has run since" in said("job-5")["message"]
    world.cycle()
    waiting = [each for each in (said(f"job-{number}") for number in range(6)) if not each["allocation"]]
    assert waiting
    for job in waiting:
        assert "none has run" not in job["message"]
        assert "wait" in job["reason"]
