"""What happens to one job on real nodes while others go on beside it: all of these at the same time."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kube_jobs import Start, check_resumes, evict, starting, steps_of, tenant_pod
from kube_nodes import TestKube, awaited, host_pod
from side_by_side import Act, SideBySide, chosen, side_by_side

from pollux.errors import UnknownJob
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import pod_path
from pollux_agent.driver.kube.documents import JOB_DIR
from pollux_agent.driver.kube.notes import READERS
from pollux_agent.protocol import JobFolder

pytestmark = [pytest.mark.needs("kube"), pytest.mark.timeout(900)]

NODES = {"node-0": 4, "node-1": 4}
SPACE = "pollux-test-alone"
AT_ONCE = 3
"""Each holds a GPU of each node at most."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where one of them happens: ``jobs`` is the folder behind the volume of the jobs that it starts."""

    kube: TestKube
    start: Start
    jobs: Path


def a_worker_that_runs_out_of_memory_comes_back_and_the_log_says_why(site: Site) -> None:
    pod = host_pod()
    pod["spec"]["containers"][0]["resources"]["limits"] = {"memory": "1536Mi"}
    other = site.start()
    other.give({"node-0": 1})
    untouched = other.runs_on({"node-0": 1}).status.incarnation
    job = site.start(pod, arguments=["--hoard-at", "30", "--marker", f"{JOB_DIR}/hoarded"])
    job.give({"node-1": 1})
    job.runs_on({"node-1": 1}, above=1)
    told = "\n".join(job.cluster.logs(job.id).lines)
    assert "OOMKilled" in told
    assert "raise its limit" in told
    assert other.now.status.incarnation == untouched


CLOCK = """
import time

now, now_ns = time.time, time.time_ns

def jumped():
    try:
        return float(open({path!r}).read())
    except (OSError, ValueError):
        return 0.0

time.time = lambda: now() + jumped()
time.time_ns = lambda: now_ns() + int(jumped() * 1e9)
"""
"""What Python reads at its start; the clock jumps as soon as the file says so."""


def a_clock_that_jumps_costs_a_job_nothing(site: Site) -> None:
    """The clock of its driver and workers, ahead and then back; the lease goes by the API server's, which
    stays.
    """
    (clock := site.jobs.parent / "clock").mkdir()
    jump = clock / "jump"
    (clock / "sitecustomize.py").write_text(CLOCK.format(path=str(jump)))
    pod = host_pod(clock)
    pod["spec"]["containers"][0]["env"] = [{"name": "PYTHONPATH", "value": str(clock)}]
    job = site.start(pod, driver_env={"PYTHONPATH": str(clock)})
    folder = JobFolder(site.jobs / job.id)
    job.give({"node-0": 1})
    before = job.runs_on({"node-0": 1}).status
    for jump_s, placement in [(7_200.0, {"node-0": 1, "node-1": 1}), (-7_200.0, {"node-1": 1})]:
        awaited(lambda: steps_of(folder, "checkpoint", before.incarnation), bool, 60)  # noqa: B023
        jump.write_text(str(jump_s))
        job.give(placement)
        after = job.runs_on(placement, above=before.incarnation).status
        assert after.since_unix_s - time.time() == pytest.approx(jump_s, abs=600), "it did jump"
        assert after.incarnation == before.incarnation + 1
        last = max(steps_of(folder, "checkpoint", before.incarnation))
        assert steps_of(folder, "resume", after.incarnation) == [last] > [0]
        assert after.attained_gpu_s < 3_600
        before = after


def a_done_job_that_is_asked_for_more_goes_on_where_it_ended(site: Site) -> None:
    job = site.start(epochs=1, arguments=["--steps", "30"])
    folder = JobFolder(site.jobs / job.id)
    job.give({"node-0": 1})
    done = awaited(lambda: job.now.status, lambda status: status.phase == "done", 240)
    assert done.outcome is not None
    assert job.submit().status.phase == "done", "nothing more is asked for"
    job.spec = replace(job.spec, epochs=2)
    assert job.submit().status.phase == "waiting"
    job.give({"node-1": 1})
    more = awaited(lambda: job.now.status, lambda status: status.phase == "done", 240)
    assert more.incarnation == done.incarnation + 1
    assert steps_of(folder, "resume", more.incarnation) == [done.outcome.step]
    assert more.outcome is not None
    assert more.outcome.step == pytest.approx(2 * done.outcome.step, abs=1)


def an_evicted_worker_comes_back_from_its_checkpoint(site: Site) -> None:
    job = site.start()
    folder = JobFolder(site.jobs / job.id)
    job.give({"node-0": 1, "node-1": 1})
    first = job.runs_on({"node-0": 1, "node-1": 1})
    awaited(lambda: steps_of(folder, "checkpoint", 1), bool, 60)
    evict(site.kube, SPACE, job.pods()[0]["metadata"]["name"])
    again = job.runs_on({"node-0": 1, "node-1": 1}, above=first.status.incarnation)
    assert again.status.outcome is None
    assert len(job.pods()) == 2
    assert check_resumes(folder) >= 1


def a_driver_that_is_deleted_is_made_again_and_the_job_goes_on(site: Site) -> None:
    job = site.start()
    job.give({"node-0": 1})
    first = job.runs_on({"node-0": 1})
    job.cluster.remove(job.id)

    def gone() -> bool:
        try:
            return job.now is None
        except UnknownJob:
            return True

    awaited(gone, timeout_s=60)
    awaited(lambda: job.cluster.held().get(job.id), lambda held: not held, 60)
    again = job.submit()
    assert again.allocation.placement == {}
    awaited(lambda: job.now.status.incarnation, lambda seen: seen == first.status.incarnation, 60)
    job.give({"node-1": 1})
    job.runs_on({"node-1": 1}, above=first.status.incarnation)


def files_that_cannot_be_written_stop_no_training(site: Site) -> None:
    """As on a volume that is full: the driver cannot keep its state, so nothing changes until it can."""
    job = site.start()
    job.give({"node-0": 1})
    first = job.runs_on({"node-0": 1}).status
    kept = site.jobs / job.id / "driver.json"
    kept.rename(kept.with_suffix(".away"))
    (kept / "in-the-way").mkdir(parents=True)
    job.give({"node-1": 1})
    awaited(lambda: "\n".join(job.cluster.logs(job.id).lines), lambda told: "can be written" in told, 60)
    assert job.now.status.incarnation == first.incarnation
    assert [pod["spec"]["nodeName"] for pod in job.pods()] == ["node-0"]
    shutil.rmtree(kept)
    kept.with_suffix(".away").rename(kept)
    assert job.runs_on({"node-1": 1}).status.incarnation == first.incarnation + 1


def an_image_that_does_not_exist_fails_the_job_with_the_cause(site: Site) -> None:
    pod = host_pod()
    pod["spec"]["containers"][0]["image"] = "localhost/no-such-image:1"
    job = site.start(pod)
    failed = awaited(lambda: job.now, lambda now: now.status.phase == "failed", 60)
    assert failed.status.final
    assert "no-such-image" in failed.status.message
    job.cluster.stop(job.id, "failed")
    assert job.now.status.phase == "ended"


def a_pod_of_somebody_else_with_a_workers_name_stays_and_the_job_says_so_and_goes_round_it(
    site: Site,
) -> None:
    job = site.start()
    foreign = tenant_pod(f"{job.id}-1-0", "node-0", 0)
    uid = site.kube.api.create(pod_path(SPACE), foreign)["metadata"]["uid"]
    job.give({"node-1": 1})
    told = awaited(lambda: job.now.status.message, lambda message: "in the way" in message, 60)
    assert f"{job.id}-1-0" in told
    job.runs_on({"node-1": 1}, above=1)
    path = pod_path(SPACE, f"{job.id}-1-0")
    there = site.kube.api.get(path)["metadata"]
    assert (there["uid"], there.get("deletionTimestamp")) == (uid, None)
    site.kube.api.delete(path, grace_s=0)


def what_somebody_breaks_of_a_jobs_pod_is_put_back_and_its_training_goes_on(site: Site) -> None:
    """All at once, and one by one what the others are read with."""
    job = site.start()
    given = job.give({"node-0": 1})
    first = job.runs_on({"node-0": 1}).status
    path = pod_path(SPACE, job.id)
    sound = site.kube.api.get(path)
    kept = {name: doc.annotations(sound)[name] for name in READERS if name != doc.STATE}
    everything = dict.fromkeys(READERS, "{garbage")
    ours = {name: text for name, text in doc.labels(sound).items() if name.startswith(doc.PREFIX)}
    for notes, labels in [
        (everything, {}),
        ({doc.ALLOCATION: None, doc.SPEC: None}, {}),
        ({doc.DECISION: "999999999999999999999"}, {doc.ROLE: None, doc.JOB: "other"}),
    ]:
        site.kube.api.patch(path, {"metadata": {"annotations": notes, "labels": labels}})
        awaited(lambda: doc.annotations(site.kube.api.get(path)), lambda now: now | kept == now, 30)
        awaited(lambda: doc.labels(site.kube.api.get(path)), lambda now: now | ours == now, 30)
    now = awaited(lambda: job.now, lambda now: now.status.phase == "running", 30)
    assert (now.allocation.decision, now.status.incarnation) == (given, first.incarnation)
    assert "put back" in "\n".join(job.cluster.logs(job.id).lines)
    job.give({"node-1": 1})
    job.runs_on({"node-1": 1}, above=first.incarnation)


ACTS = (
    what_somebody_breaks_of_a_jobs_pod_is_put_back_and_its_training_goes_on,
    a_worker_that_runs_out_of_memory_comes_back_and_the_log_says_why,
    a_clock_that_jumps_costs_a_job_nothing,
    a_pod_of_somebody_else_with_a_workers_name_stays_and_the_job_says_so_and_goes_round_it,
    a_done_job_that_is_asked_for_more_goes_on_where_it_ended,
    an_evicted_worker_comes_back_from_its_checkpoint,
    a_driver_that_is_deleted_is_made_again_and_the_job_goes_on,
    files_that_cannot_be_written_stop_no_training,
    an_image_that_does_not_exist_fails_the_job_with_the_cause,
)


@pytest.fixture(scope="module")
def acts(
    kube: TestKube, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[SideBySide]:
    for name, gpus in NODES.items():
        kube.node_up(name, gpus)
    kube.namespace(SPACE)

    def play(act: Act) -> None:
        jobs = tmp_path_factory.mktemp("alone") / "jobs"
        with starting(kube, kube.settings(SPACE, jobs, place_wait_s=6.0)) as start:
            act(Site(kube, start, jobs))

    with side_by_side(chosen(request), play, AT_ONCE) as playing:
        yield playing


@pytest.mark.parametrize("act", ACTS)
def test_one_job(acts: SideBySide, act: Act) -> None:
    acts.end(act)
